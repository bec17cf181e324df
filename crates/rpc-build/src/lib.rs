//! Generates server traits and clients from the services of `.proto` files, for build scripts:
//!
//! ```no_run
//! fn main() -> Result<(), tombolo_rpc_build::Error> {
//!     tombolo_rpc_build::compile(&["proto/calculator.proto"], &["proto"])
//! }
//! ```
//!
//! and in the crate `include!(concat!(env!("OUT_DIR"), "/PACKAGE.rs"));`. The crate needs
//! `tombolo-rpc-proto`, whose head says what is generated, and nothing else. Messages are prost's;
//! well-known types (`google/protobuf/*.proto`) are those of prost-types, which
//! `tombolo_rpc_proto::prost_types` is, with Rust's own types for wrappers and `()` for Empty. No
//! `protoc` is called: the files are read by protox.
//!
//! # Failure
//! A file that is wrong, and a method that streams, is an error with its place; nothing is written
//! then.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use prost_build::{Comments, Config, Method, Service, ServiceGenerator};
use prost_types::FileDescriptorSet;

/// Why nothing was generated.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names what each field holds")]
pub enum Error {
    /// A file is not there, or wrong.
    #[error(transparent)]
    Proto(#[from] protox::Error),
    /// A method that cannot be called.
    #[error("{method}: {what}")]
    Method {
        method: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// Not in a build script, or the file could not be written.
    #[error("generating code: {0}")]
    Generate(#[from] std::io::Error),
}

/// The longest "package.Service/Method", in bytes: its length crosses as 16 bits.
const MAX_NAME_BYTES: usize = u16::MAX as usize;

/// Generates into `OUT_DIR`, one file for each package, from these files; what they import is
/// looked for in `includes`.
///
/// # Errors
/// [`Error`].
pub fn compile(protos: &[impl AsRef<Path>], includes: &[impl AsRef<Path>]) -> Result<(), Error> {
    for path in protos {
        println!("cargo::rerun-if-changed={}", path.as_ref().display());
    }
    let out = std::env::var_os("OUT_DIR")
        .ok_or_else(|| std::io::Error::other("OUT_DIR is not set: this is for build scripts"))?;
    compile_to(protos, includes, out)
}

/// As [`compile`], into a folder.
///
/// # Errors
/// [`Error`].
pub fn compile_to(
    protos: &[impl AsRef<Path>],
    includes: &[impl AsRef<Path>],
    out: impl Into<PathBuf>,
) -> Result<(), Error> {
    let files = protox::compile(protos, includes)?;
    check(&files)?;
    let mut config = Config::new();
    config
        .out_dir(out)
        .prost_path("::tombolo_rpc_proto::prost")
        .prost_types_path("::tombolo_rpc_proto::prost_types")
        .service_generator(Box::new(Generator));
    Ok(config.compile_fds(files)?)
}

/// All methods can be called.
fn check(files: &FileDescriptorSet) -> Result<(), Error> {
    for file in &files.file {
        for service in &file.service {
            for method in &service.method {
                let name = path(file.package(), service.name(), method.name());
                let what = if method.client_streaming() || method.server_streaming() {
                    "streams cannot be called; expected a method with one request and one reply"
                } else if name.len() > MAX_NAME_BYTES {
                    "its name is longer than 65535 bytes"
                } else {
                    continue;
                };
                return Err(Error::Method { method: name, what });
            }
        }
    }
    Ok(())
}

/// A service's full name; without a package it has no dot.
fn full_name(package: &str, service: &str) -> String {
    if package.is_empty() { service.into() } else { format!("{package}.{service}") }
}

fn path(package: &str, service: &str, method: &str) -> String {
    format!("{}/{method}", full_name(package, service))
}

struct Generator;

/// The file's own comments, or a default line.
fn document(comments: &Comments, otherwise: &str, indent: u8, code: &mut String) {
    if comments.leading.is_empty() {
        let _ = writeln!(code, "{:width$}/// {otherwise}", "", width = usize::from(indent) * 4);
    } else {
        comments.append_with_indent(indent, code);
    }
}

impl ServiceGenerator for Generator {
    fn generate(&mut self, service: Service, code: &mut String) {
        let name = full_name(&service.package, &service.proto_name);
        trait_of(&service, &name, code);
        server_of(&service, &name, code);
        client_of(&service, &name, code);
    }
}

// `writeln!` into a String cannot fail.

fn trait_of(service: &Service, name: &str, code: &mut String) {
    document(&service.comments, &format!("Who serves `{name}`."), 0, code);
    let _ = writeln!(code, "pub trait {}: Send + Sync + 'static {{", service.name);
    for Method { name, proto_name, comments, input_type, output_type, .. } in &service.methods {
        document(comments, &format!("`{proto_name}`."), 1, code);
        let _ = writeln!(
            code,
            "    fn {name}(&self, context: &::tombolo_rpc_proto::Context<'_>, request: {input_type})\n        \
             -> ::core::result::Result<{output_type}, ::tombolo_rpc_proto::Status>;"
        );
    }
    code.push_str("}\n\n");
}

fn server_of(service: &Service, name: &str, code: &mut String) {
    let kind = &service.name;
    let mut arms = String::new();
    for Method { name, proto_name, .. } in &service.methods {
        let _ = writeln!(
            arms,
            "            \"{proto_name}\" => ::tombolo_rpc_proto::unary(call, |context, request| self.0.{name}(context, request)),"
        );
    }
    let _ = write!(
        code,
        "/// The methods of `{name}`, for a `tombolo_rpc_proto::Router`.
#[derive(Clone, Debug)]
pub struct {kind}Server<S>(pub S);

impl<S: {kind}> ::tombolo_rpc_proto::Methods for {kind}Server<S> {{
    fn service(&self) -> &'static str {{
        \"{name}\"
    }}

    #[allow(unused_variables, clippy::match_single_binding)]
    fn call(
        &self,
        method: &str,
        call: &::tombolo_rpc_proto::Call<'_>,
    ) -> ::core::option::Option<::core::result::Result<::std::vec::Vec<u8>, ::tombolo_rpc_proto::Status>> {{
        ::core::option::Option::Some(match method {{
{arms}            _ => return ::core::option::Option::None,
        }})
    }}
}}

"
    );
}

fn client_of(service: &Service, name: &str, code: &mut String) {
    let kind = &service.name;
    let _ = write!(
        code,
        "/// Who calls `{name}`.
#[derive(Clone, Debug)]
pub struct {kind}Client(::tombolo_rpc_proto::Caller);

impl {kind}Client {{
    /// Connects to the service of that name in this user's folder.
    ///
    /// # Errors
    /// As `tombolo_rpc::client::Client::connect`.
    pub fn connect(name: &str) -> ::core::result::Result<Self, ::tombolo_rpc_proto::tombolo_rpc::client::ConnectError> {{
        ::core::result::Result::Ok(Self::new(::tombolo_rpc_proto::tombolo_rpc::client::Client::connect(name)?))
    }}

    /// Over a connection.
    pub fn new(client: ::tombolo_rpc_proto::tombolo_rpc::client::Client) -> Self {{
        Self(::tombolo_rpc_proto::Caller::new(client))
    }}

    /// The connection.
    pub fn client(&self) -> &::tombolo_rpc_proto::tombolo_rpc::client::Client {{
        self.0.client()
    }}
"
    );
    let options = "::tombolo_rpc_proto::tombolo_rpc::client::CallOptions";
    let error = "::tombolo_rpc_proto::Error";
    for Method { name: method, proto_name, comments, input_type, output_type, .. } in &service.methods {
        let path = path(&service.package, &service.proto_name, proto_name);
        code.push('\n');
        document(comments, &format!("Calls `{proto_name}` and waits."), 1, code);
        let _ = write!(
            code,
            "    ///
    /// # Errors
    /// What the service answered, or how the call ended.
    pub fn {method}(&self, request: &{input_type}, options: &{options}) -> ::core::result::Result<{output_type}, {error}> {{
        self.0.call(\"{path}\", request, options)
    }}

    /// Calls `{proto_name}` without waiting.
    ///
    /// # Errors
    /// Where the request could not be sent.
    pub fn submit_{plain}(
        &self,
        request: &{input_type},
        options: &{options},
    ) -> ::core::result::Result<::tombolo_rpc_proto::Pending<{output_type}>, {error}> {{
        self.0.submit(\"{path}\", request, options)
    }}

    /// Calls `{proto_name}`, as a future.
    pub fn {plain}_async(
        &self,
        request: &{input_type},
        options: &{options},
    ) -> impl ::core::future::Future<Output = ::core::result::Result<{output_type}, {error}>> + use<> {{
        self.0.call_async(\"{path}\", request, options)
    }}
",
            // A name that is a Rust keyword is one only without our additions.
            plain = method.trim_start_matches("r#"),
        );
    }
    code.push_str("}\n\n");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiled(text: &str) -> Result<String, Error> {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a.proto");
        std::fs::write(&file, text).unwrap();
        compile_to(&[&file], &[dir.path()], dir.path())?;
        Ok(std::fs::read_to_string(dir.path().join("p.rs")).unwrap())
    }

    #[test]
    fn comments_come_along_and_words_of_rust_are_no_names() {
        let code = compiled(
            "syntax = \"proto3\"; package p;
             message Q { string type = 1; }
             // Looks things up.
             service Look {
                 // Finds one.
                 rpc Match(Q) returns (Q);
                 rpc Other(Q) returns (Q);
             }
             service Empty {}",
        )
        .unwrap();
        for part in [
            "/// Looks things up.\npub trait Look",
            "    /// Finds one.\n    fn r#match(&self",
            "pub fn submit_match(",
            "pub fn match_async(",
            "    /// `Other`.\n    fn other(&self",
            "\"p.Look/Match\"",
            "pub struct EmptyServer<S>",
        ] {
            assert!(code.contains(part), "no {part} in\n{code}");
        }
    }

    #[test]
    fn well_known_types_are_those_that_the_runtime_crate_brings() {
        let code = compiled(
            "syntax = \"proto3\"; package p;
             import \"google/protobuf/any.proto\"; import \"google/protobuf/duration.proto\"; import \"google/protobuf/empty.proto\";
             import \"google/protobuf/struct.proto\"; import \"google/protobuf/timestamp.proto\"; import \"google/protobuf/wrappers.proto\";
             message Q {
                 google.protobuf.Any any = 1; google.protobuf.Duration lasts = 2; google.protobuf.Struct more = 3;
                 google.protobuf.Timestamp at = 4; google.protobuf.BoolValue maybe = 5;
             }
             service S { rpc A(google.protobuf.Empty) returns (Q); }",
        )
        .unwrap();
        for name in ["Any", "Duration", "Struct", "Timestamp"] {
            assert!(code.contains(&format!("::tombolo_rpc_proto::prost_types::{name}")), "no {name} in\n{code}");
        }
        // A crate that the user would have to name too.
        assert!(
            !code.contains("<::prost") && !code.replace("proto::prost_types", "").contains("::prost_types"),
            "{code}"
        );
    }

    #[test]
    fn streams_and_wrong_files_are_errors_with_their_place() {
        let head = "syntax = \"proto3\"; package p; message Q {}";
        for stream in ["rpc A(stream Q) returns (Q);", "rpc A(Q) returns (stream Q);"] {
            let error = compiled(&format!("{head} service S {{ {stream} }}")).unwrap_err();
            assert!(matches!(&error, Error::Method { method, .. } if method == "p.S/A"), "{error}");
        }
        let error = compiled(&format!("{head} service S {{ rpc A(Nothing) returns (Q); }}")).unwrap_err();
        assert!(error.to_string().contains("Nothing"), "{error}");
        assert!(matches!(compile_to(&["no.proto"], &["."], "."), Err(Error::Proto(_))));
    }
}
