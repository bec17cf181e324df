//! `tombolo doctor`.

use std::io::{self, IsTerminal};

use clap::Args;
use tombolo_host::doctor::{self, Outcome, Report};

use crate::exit::{Exit, Failure};
use crate::out::{self, Tone, toned};

#[derive(Args, Debug)]
pub(crate) struct Doctor {
    /// Print the findings as JSON
    #[arg(long)]
    json: bool,
}

impl Doctor {
    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        let tty = io::stderr().is_terminal();
        let report = doctor::examine(|what| {
            if tty {
                eprint!("\r\x1b[Ktrying {what} …");
            }
        });
        if tty {
            eprint!("\r\x1b[K");
        }
        if self.json {
            out::json(&report)?;
        } else {
            out::print(&render(&report, out::colour()))?;
        }
        Ok(if report.is_usable() { Exit::Done } else { Exit::Failed })
    }
}

fn render(report: &Report, colour: bool) -> String {
    let width = report.findings.iter().map(|f| f.what.chars().count()).max().unwrap_or(0);
    let mut out = String::new();
    for f in &report.findings {
        let (word, tone) = match f.outcome {
            Outcome::Works => ("works   ", Tone::Good),
            Outcome::Degraded => ("degraded", Tone::Bold),
            Outcome::Missing => ("missing ", Tone::Bad),
        };
        let pad = " ".repeat(width - f.what.chars().count());
        out.push_str(&format!("{}  {}{pad}  {}\n", toned(word, tone, colour), f.what, f.seen));
        if f.outcome != Outcome::Works {
            out.push_str(&format!("          {}  needed for {}; {}\n", " ".repeat(width), f.needed_for, f.advice));
        }
    }
    let count = |outcome| report.findings.iter().filter(|f| f.outcome == outcome).count();
    let sum = (count(Outcome::Works), count(Outcome::Degraded), count(Outcome::Missing));
    out.push_str(&format!("\n{} work, {} degraded, {} missing; ", sum.0, sum.1, sum.2));
    out.push_str(if report.is_usable() { "a fabric can run here\n" } else { "a fabric cannot run here yet\n" });
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use tombolo_host::doctor::Finding;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        doctor: Doctor,
    }

    #[test]
    fn json_is_asked_for() {
        assert!(Line::try_parse_from(["doctor", "--json"]).unwrap().doctor.json);
        assert!(!Line::try_parse_from(["doctor"]).unwrap().doctor.json);
    }

    #[test]
    fn what_does_not_work_comes_with_who_needs_it_and_what_to_do() {
        let finding = |what: &str, outcome, advice: &str| Finding {
            what: what.into(),
            outcome,
            seen: "seen".into(),
            needed_for: "cells".into(),
            advice: advice.into(),
        };
        let findings = vec![finding("QEMU", Outcome::Works, ""), finding("passt", Outcome::Missing, "install passt")];
        let text = render(&Report { schema: 1, findings }, false);
        assert!(text.contains("works     QEMU   seen\n") && text.contains("needed for cells; install passt"), "{text}");
        assert!(text.ends_with("1 work, 0 degraded, 1 missing; a fabric can run here\n"), "{text}");
    }
}
