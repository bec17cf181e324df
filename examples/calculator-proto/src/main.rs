//! The typed calculator as a program:
//!
//! ```text
//! target/release/calculator-proto &       # after ./x build; it serves until it is killed
//! target/release/calculator-proto 6 / 7
//! ```

use std::process::ExitCode;
use std::time::Duration;

use calculator_proto::Machine;
use calculator_proto::proto::{CalculatorClient, Operands};
use tombolo_rpc_proto::tombolo_rpc::client::CallOptions;
use tombolo_rpc_proto::tombolo_rpc::provider::{Options, Service};

const NAME: &str = "calculator-proto";
const USAGE: &str = "expected nothing, to serve, or A + B or A / B as three words, to call";

fn number(word: &str) -> Result<f64, String> {
    word.parse().map_err(|_| format!("\"{word}\" is not a number; {USAGE}"))
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [a, operator, b] = &words[..] {
        let client = CalculatorClient::connect(NAME)?;
        let request = Operands { a: number(a)?, b: number(b)? };
        let options = CallOptions::within(Duration::from_millis(5));
        let result = match operator.as_str() {
            "+" => client.add(&request, &options)?,
            "/" => client.divide(&request, &options)?,
            other => return Err(format!("\"{other}\" is neither + nor /; {USAGE}").into()),
        };
        println!("{}", result.value);
        return Ok(());
    }
    if !words.is_empty() {
        return Err(USAGE.into());
    }
    let _service = Service::register(NAME, Options::default(), Machine::default().router())?;
    println!("serving");
    loop {
        std::thread::park();
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("calculator-proto: {error}");
            ExitCode::FAILURE
        }
    }
}
