//! What the calculator answers.

use alloc::string::{String, ToString};

/// The code of an answer to what is no calculation.
pub const NOT_UNDERSTOOD: u32 = 1;

/// The code of an answer to a division by zero.
pub const DIVISION_BY_ZERO: u32 = 2;

/// The answer to "A + B", with + - * or /, and its code.
pub fn answer(request: &[u8]) -> (String, u32) {
    match core::str::from_utf8(request).map_err(|_| NOT_UNDERSTOOD).and_then(calculate) {
        Ok(number) => (number.to_string(), 0),
        Err(DIVISION_BY_ZERO) => ("division by zero".to_string(), DIVISION_BY_ZERO),
        Err(code) => ("expected \"A + B\", with + - * or /".to_string(), code),
    }
}

/// A decimal number; `parse` alone would take "inf", too.
fn number(word: &str) -> Result<f64, u32> {
    let is_decimal = word.bytes().all(|b| b.is_ascii_digit() || b".eE+-".contains(&b));
    word.parse().ok().filter(|_| is_decimal).ok_or(NOT_UNDERSTOOD)
}

/// The result, or the code of the answer.
fn calculate(text: &str) -> Result<f64, u32> {
    let mut words = text.split_whitespace();
    let (Some(a), Some(operator), Some(b), None) = (words.next(), words.next(), words.next(), words.next()) else {
        return Err(NOT_UNDERSTOOD);
    };
    let (a, b) = (number(a)?, number(b)?);
    match operator {
        "+" => Ok(a + b),
        "-" => Ok(a - b),
        "*" => Ok(a * b),
        "/" if b == 0.0 => Err(DIVISION_BY_ZERO),
        "/" => Ok(a / b),
        _ => Err(NOT_UNDERSTOOD),
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
        for wrong in [&b"6"[..], b"6 % 7", b"six * 7", b"\xff * 2", b"", b"inf + 1", b"6 / 7 8"] {
            assert_eq!(answer(wrong).1, NOT_UNDERSTOOD);
        }
        for zero in ["6 / 0", "0 / -0"] {
            assert_eq!(answer(zero.as_bytes()), ("division by zero".to_string(), DIVISION_BY_ZERO));
        }
    }
}
