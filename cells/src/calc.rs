//! What the calculator answers.

use alloc::string::{String, ToString};

/// The code of an answer to what is no calculation.
pub const NOT_UNDERSTOOD: u32 = 1;

/// The answer to "A + B", with + - * or /, and its code.
pub fn answer(request: &[u8]) -> (String, u32) {
    match core::str::from_utf8(request).ok().and_then(calculate) {
        Some(number) => (number.to_string(), 0),
        None => ("expected \"A + B\", with + - * or /".to_string(), NOT_UNDERSTOOD),
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_calculates_and_says_what_it_expected() {
        for (request, want) in [("6 * 7", "42"), ("1 / 4", "0.25"), ("2 - 3", "-1"), ("0.5 + 1", "1.5")] {
            assert_eq!(answer(request.as_bytes()), (want.to_string(), 0));
        }
        for wrong in [&b"6"[..], b"6 % 7", b"six * 7", b"\xff * 2", b""] {
            assert_eq!(answer(wrong).1, NOT_UNDERSTOOD);
        }
    }
}
