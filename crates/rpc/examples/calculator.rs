//! A service that calculates: "2 + 3" is answered by "5". Try it:
//!
//! ```text
//! cargo run -p tombolo-rpc --example calculator &
//! tombolo call calculator '6 * 7' --deadline 5ms
//! cargo run -p tombolo-rpc --example calculator -- '1 / 3'
//! ```

use std::time::Duration;

use tombolo_rpc::client::{CallOptions, Client};
use tombolo_rpc::provider::{Options, Reply, Request, Service};

/// The answer's code where the request was no calculation.
const NOT_UNDERSTOOD: u32 = 1;

fn calculate(text: &str) -> Option<f64> {
    let mut words = text.split_whitespace();
    let (a, operator, b) = (words.next()?, words.next()?, words.next()?);
    let (a, b): (f64, f64) = (a.parse().ok()?, b.parse().ok()?);
    match operator {
        "+" => Some(a + b),
        "-" => Some(a - b),
        "*" => Some(a * b),
        "/" => Some(a / b),
        _ => None,
    }
}

fn serve(request: &Request<'_>, reply: &mut Reply<'_>) {
    let bytes = request.to_vec();
    let result = std::str::from_utf8(&bytes).ok().and_then(calculate);
    let text = result.map_or("expected \"A + B\", with + - * or /".into(), |number| number.to_string());
    if result.is_none() {
        reply.set_code(NOT_UNDERSTOOD);
    }
    // No room for the reply is answered as such.
    let _ = reply.write(text.as_bytes());
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    if let Some(text) = std::env::args().nth(1) {
        let client = Client::connect("calculator")?;
        let reply = client.call(text.as_bytes(), &CallOptions::within(Duration::from_millis(5)))?;
        println!("{}", String::from_utf8_lossy(&reply.to_vec()?));
        return Ok(());
    }
    let options = Options { workers: 2, budget: Duration::from_micros(50), admission: true, ..Options::default() };
    let service = Service::register("calculator", options, serve)?;
    println!("serving; workers run as: {}", service.report().workers.join(", "));
    loop {
        std::thread::park();
    }
}
