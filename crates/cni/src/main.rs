//! The CNI plugin of Tombolo: puts a container on a network of a running fabric.
//!
//! A container runtime starts it once per command, with the command in the environment and the
//! network configuration on standard input (CNI 0.3.1 to 1.1.0). The container gets a tap of the
//! fabric's switch directly in its namespace, without a veth pair, so offloads are kept
//! (docs/kubernetes.md). [`request`] checks what comes in, [`attach`] carries it out, [`fabric`]
//! talks to the daemon, [`dan`] writes the files
//! that Kata reads, [`error`] has the codes. Nothing is kept between two calls: what is needed
//! is in the fabric and follows from the container's ID. So parallel calls need no lock.
#![forbid(unsafe_code)]

mod attach;
mod dan;
mod error;
mod fabric;
mod request;

use std::io::{Read, Write};
use std::process::ExitCode;

use request::{Command, Environment, MAX_INPUT_BYTES};
use serde_json::Value;

fn answer(environment: &Environment, input: &[u8]) -> Result<Option<Value>, error::CniError> {
    let command = Command::parse(environment.command.as_deref())?;
    if command == Command::Version {
        return Ok(Some(attach::versions(&request::version_of(input))));
    }
    attach::run(command, environment, &request::parse(input)?)
}

fn main() -> ExitCode {
    let environment = Environment::of_process();
    if environment.command.is_none() && std::env::args_os().len() > 1 {
        println!(
            "tombolo-cni {}: a CNI plugin; a container runtime starts it, see docs/kubernetes.md",
            env!("CARGO_PKG_VERSION")
        );
        return ExitCode::SUCCESS;
    }
    let mut input = Vec::new();
    let read = std::io::stdin().lock().take(MAX_INPUT_BYTES + 1).read_to_end(&mut input);
    let result = match read {
        Ok(_) => answer(&environment, &input),
        Err(error) => Err(error::CniError::Decode(error.to_string())),
    };
    let (text, code) = match result {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(value)) => (value.to_string(), ExitCode::SUCCESS),
        Err(error) => (error.object(&request::version_of(&input)).to_string(), ExitCode::FAILURE),
    };
    // A runtime that does not read has ended.
    let _ = writeln!(std::io::stdout(), "{text}");
    code
}
