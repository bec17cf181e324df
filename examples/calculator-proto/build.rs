//! Generates the server's trait and the client.

fn main() -> Result<(), tombolo_rpc_build::Error> {
    tombolo_rpc_build::compile(&["proto/calculator.proto", "proto/known.proto"], &["proto"])
}
