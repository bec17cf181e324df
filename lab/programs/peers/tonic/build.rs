//! Generates client and server of the one method; no .proto file and no protoc.

use tonic_build::manual::{Builder, Method, Service};

fn main() {
    let echo = Method::builder()
        .name("echo")
        .route_name("Echo")
        .input_type("crate::Message")
        .output_type("crate::Message")
        .codec_path("tonic_prost::ProstCodec")
        .build();
    let service = Service::builder().name("Echo").package("bench").method(echo).build();
    Builder::new().compile(&[service]);
}
