//! A service that calculates: "2 + 3" is answered by "5". Try it:
//!
//! ```text
//! cargo build --release -p tombolo-rpc --example calculator
//! target/release/examples/calculator &                    # until it is killed
//! tombolo call calculator '6 * 7' --deadline 5ms
//! target/release/examples/calculator '1 / 3'
//! ```
//!
//! The same in C, C++ and Python is in bindings/examples; calculator.c there tells the protocol and
//! the arguments.

use std::fmt::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use tombolo_rpc::client::{CallError, CallOptions, Client, ConnectError};
use tombolo_rpc::provider::{Options, Reply, Request, Service};

const USAGE: &str =
    "expected [--name NAME] [--delay-ms MS] to serve, [--name NAME] [--within-ms MS] [--timeout-ms MS] 'A + B' to call";
/// The answer's code where the request was no calculation.
const NOT_UNDERSTOOD: u32 = 1;
/// The answer's code where there is no result.
const DIVISION_BY_ZERO: u32 = 2;

/// A decimal number; `parse` alone would take "inf", too.
fn number(word: &str) -> Option<f64> {
    word.bytes().all(|b| b.is_ascii_digit() || b".eE+-".contains(&b)).then(|| word.parse().ok())?
}

/// The result, or a code with its words.
fn calculate(text: &str) -> Result<f64, (u32, &'static str)> {
    let not_understood = (NOT_UNDERSTOOD, "expected \"A + B\", with + - * or /");
    let words: Vec<&str> = text.split_ascii_whitespace().collect();
    let [a, operator, b] = words[..] else { return Err(not_understood) };
    let (a, b) = number(a).zip(number(b)).ok_or(not_understood)?;
    match operator {
        "+" => Ok(a + b),
        "-" => Ok(a - b),
        "*" => Ok(a * b),
        "/" if b == 0.0 => Err((DIVISION_BY_ZERO, "division by zero")),
        "/" => Ok(a / b),
        _ => Err(not_understood),
    }
}

fn serve(request: &Request<'_>, reply: &mut Reply<'_>, delay: Duration) {
    if !delay.is_zero() {
        println!("working");
        std::thread::sleep(delay);
    }
    let bytes = request.to_vec();
    let mut text = String::new();
    match calculate(&String::from_utf8_lossy(&bytes)) {
        Ok(number) => {
            let _ = write!(text, "{number:.6}");
            if text.contains('.') {
                text.truncate(text.trim_end_matches('0').trim_end_matches('.').len());
            }
        }
        Err((code, words)) => {
            reply.set_code(code);
            text.push_str(words);
        }
    }
    // No room for the reply is answered as such.
    let _ = reply.write(text.as_bytes());
}

/// How a call or a connection failed, as all languages name it.
fn failed(error: &(dyn std::error::Error + 'static)) -> ExitCode {
    let name = match (error.downcast_ref(), error.downcast_ref()) {
        (Some(CallError::DeadlineExceeded), _) => "deadline-exceeded",
        (Some(CallError::Late), _) => "late",
        (Some(CallError::Refused(_)), _) => "refused",
        (Some(CallError::Expired), _) => "expired",
        (Some(CallError::ProviderGone), _) => "provider-gone",
        (Some(CallError::Timeout), _) => "timeout",
        (_, Some(ConnectError::NoService { .. })) => "no-service",
        _ => "other",
    };
    println!("error: {name}");
    eprintln!("{error}");
    ExitCode::from(2)
}

fn call(name: &str, text: &str, options: &CallOptions) -> Result<ExitCode, Box<dyn std::error::Error>> {
    let reply = Client::connect(name)?.call(text.as_bytes(), options)?;
    if reply.code() != 0 {
        print!("code {}: ", reply.code());
    }
    println!("{}", String::from_utf8_lossy(&reply.to_vec()?));
    Ok(ExitCode::from(u8::from(reply.code() != 0)))
}

fn milliseconds(text: &str) -> Result<Duration, String> {
    text.parse().map(Duration::from_millis).map_err(|_| format!("\"{text}\" is not a number of milliseconds; {USAGE}"))
}

fn run() -> Result<ExitCode, Box<dyn std::error::Error>> {
    let (mut name, mut text, mut delay) = (String::from("calculator"), None, Duration::ZERO);
    let mut call_options = CallOptions::within(Duration::from_millis(5));
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word}: expected a value; {USAGE}"));
        match word.as_str() {
            "--name" => name = value()?,
            "--delay-ms" => delay = milliseconds(&value()?)?,
            "--within-ms" => {
                call_options.deadline = CallOptions::within(milliseconds(&value()?)?).deadline;
            }
            "--timeout-ms" => call_options.timeout = milliseconds(&value()?)?,
            _ if word.starts_with("--") => return Err(format!("{word}: {USAGE}").into()),
            _ => text = Some(word),
        }
    }
    if let Some(text) = text {
        return Ok(call(&name, &text, &call_options).unwrap_or_else(|error| failed(&*error)));
    }
    let options = Options { workers: 2, budget: Duration::from_micros(50), admission: true, ..Options::default() };
    let handler = move |request: &Request<'_>, reply: &mut Reply<'_>| serve(request, reply, delay);
    let _service = Service::register(&name, options, handler)?;
    println!("serving");
    loop {
        std::thread::park();
    }
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("calculator: {error}");
        ExitCode::from(2)
    })
}
