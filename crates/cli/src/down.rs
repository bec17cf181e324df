//! `tombolo down`.

use clap::Args;
use tombolo_host::api::report::Status;
use tombolo_host::daemon;

use crate::exit::{Exit, Failure};
use crate::out;
use crate::select::{OfMachine, Select};

#[derive(Args, Debug)]
pub(crate) struct Down {
    #[command(flatten)]
    of: OfMachine,
}

impl Down {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let client = select.client_on(&self.of)?;
        let name = client.fabric().to_string();
        // What is going to be gone; a fabric that cannot say may end all the same.
        let stood = client.status();
        let by_signal = || {
            daemon::end(&name, &out::teller())?;
            out::print(&told(&name, stood.as_ref().ok()))?;
            Ok(Exit::Done)
        };
        if stood.as_ref().is_err_and(|error| error.is_unanswered()) {
            return by_signal();
        }
        match client.down() {
            Ok(()) => {
                out::print(&told(&name, stood.as_ref().ok()))?;
                Ok(Exit::Done)
            }
            Err(error) if error.is_unanswered() => by_signal(),
            Err(error) if error.is_absent() => match daemon::clean_up(&name, out::teller())? {
                Some(_) => {
                    out::tell!("tombolo: {name} did not run any more; what its killed daemon had left is cleared up");
                    Ok(Exit::Done)
                }
                // It ran a moment ago: its answer was lost, or it was another's `down`.
                None if stood.is_ok() => {
                    out::print(&told(&name, stood.as_ref().ok()))?;
                    Ok(Exit::Done)
                }
                None => Err(error.into()),
            },
            Err(error) => Err(error.into()),
        }
    }
}

/// `demo is down: 1 network, 3 machines, 5 ports and 1 forward are gone`.
fn told(name: &str, stood: Option<&Status>) -> String {
    let what = stood.map(|s| {
        let machines = s.machines.iter().filter(|m| m.pid.is_some()).count();
        format!(
            ": {}, {}, {} and {} are gone",
            out::counted(s.networks.len(), "network"),
            out::counted(machines, "machine"),
            out::counted(s.ports.len(), "port"),
            out::counted(s.forwards.len(), "forward"),
        )
    });
    format!("{name} is down{}\n", what.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_taken_down_is_told_in_one_line() {
        let text = r#"{"schema":1,"version":"","name":"t","file":"","pid":1,"uptime_s":0,"networks":[],"forwards":[],"workers":[],"warnings":[],
            "machines":[{"name":"a","kind":"cell","state":"running","pid":1,"accel":"tcg","machine":"microvm","addresses":{},"uptime_s":1,"last_end":null,"restarts":0,"adopted":false}],
            "ports":[]}"#;
        let status: Status = serde_json::from_str(text).unwrap();
        assert_eq!(told("t", Some(&status)), "t is down: 0 networks, 1 machine, 0 ports and 0 forwards are gone\n");
        assert_eq!(told("t", None), "t is down\n");
    }
}
