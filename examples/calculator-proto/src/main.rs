//! The typed calculator as a program:
//!
//! ```text
//! cargo run -p calculator-proto &
//! cargo run -p calculator-proto -- 6 / 7
//! ```

use std::time::Duration;

use calculator_proto::Machine;
use calculator_proto::proto::{CalculatorClient, Operands};
use tombolo_rpc_proto::tombolo_rpc::client::CallOptions;
use tombolo_rpc_proto::tombolo_rpc::provider::{Options, Service};

const NAME: &str = "calculator-proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [a, operator, b] = &words[..] {
        let client = CalculatorClient::connect(NAME)?;
        let request = Operands { a: a.parse()?, b: b.parse()? };
        let options = CallOptions::within(Duration::from_millis(5));
        let result = match operator.as_str() {
            "+" => client.add(&request, &options)?,
            "/" => client.divide(&request, &options)?,
            other => return Err(format!("\"{other}\": expected + or /").into()),
        };
        println!("{}", result.value);
        return Ok(());
    }
    let _service = Service::register(NAME, Options::default(), Machine::default().router())?;
    println!("serving");
    loop {
        std::thread::park();
    }
}
