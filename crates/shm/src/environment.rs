//! Environment variables.

use std::ffi::OsString;

/// The value of a variable. One that is set to nothing is not set: `NAME= program` and a unit's
/// `Environment=NAME=` mean so.
pub fn variable(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_is_set_to_nothing_is_not_set() {
        const KEY: &str = "TOMBOLO_TEST_VARIABLE";
        if std::env::var_os(KEY).is_some() {
            assert_eq!(
                variable(KEY).as_deref().and_then(|value| value.to_str()),
                std::env::var("TOMBOLO_TEST_VALUE").ok().as_deref()
            );
            return;
        }
        assert_eq!(variable(KEY), None);
        // Of another process, since the environment is that of all threads.
        for (value, expected) in [("", None), ("x", Some("x"))] {
            let mut command = std::process::Command::new(std::env::current_exe().unwrap());
            command
                .args(["--exact", "environment::tests::a_variable_that_is_set_to_nothing_is_not_set"])
                .env(KEY, value);
            if let Some(expected) = expected {
                command.env("TOMBOLO_TEST_VALUE", expected);
            }
            let out = command.output().unwrap();
            assert!(out.status.success() && String::from_utf8_lossy(&out.stdout).contains("1 passed"), "{out:?}");
        }
    }
}
