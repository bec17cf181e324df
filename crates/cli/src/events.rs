//! `tombolo events`: what happened in a fabric, also overnight, also in one that is down.

use std::collections::BTreeSet;
use std::io::{self, Write};
use std::ops::ControlFlow;

use clap::Args;
use clap::builder::PossibleValuesParser;
use tombolo_host::api::client::Ending;
use tombolo_host::api::report::{EventReport, Status};
use tombolo_host::fabric::events::{Files, Kind};
use tombolo_host::file::nearest;
use tombolo_host::{moment, rundir};

use crate::exit::{Exit, Failure};
use crate::number;
use crate::out::{self, Tone, toned};
use crate::select::Select;

const EXAMPLES: &str = "\
Examples:
  tombolo events --since 12h                     what happened overnight
  tombolo events --kind death --kind fault       what went wrong
  tombolo events --follow --json web | jq .text  what happens to web, for a program";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Events {
    /// Only events of these machines, ports, links and networks
    #[arg(value_name = "NAME")]
    names: Vec<String>,
    /// Print further events as they happen, until the fabric is down
    #[arg(short = 'F', long)]
    follow: bool,
    /// Only events from then on: 90s, 10m, 2h or 1d ago, a day (2026-11-21), or a time in UTC
    /// (21:43, 2026-11-21T21:43:05Z)
    #[arg(long, value_name = "WHEN", allow_hyphen_values = true)]
    since: Option<String>,
    /// Only events of this kind; repeat it for more
    #[arg(long, value_name = "KIND", value_parser = PossibleValuesParser::new(Kind::ALL.map(Kind::word)))]
    kind: Vec<String>,
    /// Only the last N of those that there are
    #[arg(short = 'n', long, value_name = "N", value_parser = number::count, allow_hyphen_values = true)]
    last: Option<u64>,
    /// Print each event as JSON, one per line
    #[arg(long)]
    json: bool,
}

/// The moment that `--since` says.
pub(crate) fn since(text: Option<&str>) -> Result<u64, Failure> {
    let now = moment::unix_ms();
    let wrong = |error| Failure::misused(format!("--since: {error}"));
    text.map_or(Ok(0), |text| moment::since(text, now).map_err(wrong))
}

/// What an event is about.
fn subjects(event: &EventReport) -> impl Iterator<Item = &str> {
    [&event.name, &event.network].into_iter().flatten().map(String::as_str)
}

/// What is to be said of a name that no event so far concerns. It may be mistyped, or of a member
/// that comes.
fn stranger(name: &str, known: &[EventReport], is_there: impl FnOnce() -> bool) -> Option<String> {
    let names: BTreeSet<&str> = known.iter().flat_map(subjects).collect();
    if names.contains(name) {
        return None;
    }
    let near = nearest(name, names).filter(|_| !is_there());
    let near = near.map_or_else(String::new, |near| format!("; did you mean \"{near}\"?"));
    Some(format!("no event so far concerns \"{name}\"{near}"))
}

/// Whether the fabric has something of that name that events are about.
fn has(status: &Status, name: &str) -> bool {
    let names = status.machines.iter().map(|m| &m.name).chain(status.ports.iter().map(|p| &p.name));
    let more = status.networks.iter().map(|n| &n.name).chain(status.links.iter().map(|l| &l.name));
    names.chain(more).any(|known| known == name)
}

impl Events {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let from_ms = since(self.since.as_deref())?;
        let mut client = select.client()?;
        let mut last = None;
        let mut known: Vec<EventReport> = Vec::new();
        let mut is_up = true;
        loop {
            match client.events(last) {
                Ok(answer) => {
                    let Some(newest) = answer.events.last() else {
                        last = Some(answer.last);
                        break;
                    };
                    last = Some(newest.id);
                    known.extend(answer.events);
                }
                // It is down: what it left is on the disk.
                Err(error) if error.is_absent() => {
                    known = Files::new(&rundir::state_folder(client.fabric())).load().into();
                    if known.is_empty() {
                        return Err(error.into());
                    }
                    is_up = false;
                    break;
                }
                Err(error) => return Err(error.into()),
            }
        }
        for name in &self.names {
            let is_there = || client.status().is_ok_and(|status| has(&status, name));
            if let Some(note) = stranger(name, &known, is_there) {
                out::tell!("tombolo: {note}");
            }
        }
        known.retain(|event| event.unix_ms >= from_ms && self.wants(event));
        let skip = self.last.map_or(0, |n| known.len().saturating_sub(usize::try_from(n).unwrap_or(usize::MAX)));
        self.print(&known[skip..])?;
        if self.follow && is_up {
            return self.follow(&mut client, last.unwrap_or(0));
        }
        if self.follow {
            out::tell!("tombolo: {} is down", client.fabric());
        }
        Ok(Exit::Done)
    }

    fn follow(&self, client: &mut tombolo_host::api::client::Client, after: u64) -> Result<Exit, Failure> {
        let mut after = after;
        loop {
            let mut pending = Vec::new();
            let ending = client.follow_events(after, |piece| {
                pending.extend_from_slice(piece);
                while let Some(end) = pending.iter().position(|byte| *byte == b'\n') {
                    let line: Vec<u8> = pending.drain(..=end).collect();
                    if let Ok(event) = serde_json::from_slice::<EventReport>(&line) {
                        after = event.id;
                        if self.wants(&event) {
                            io::stdout().lock().write_all(self.line(&event, out::colour()).as_bytes())?;
                            io::stdout().lock().flush()?;
                        }
                    } else if let Some(lost) = lost(&line) {
                        out::tell!("tombolo: {lost} events were not read in time and are left out");
                    }
                }
                Ok(ControlFlow::Continue(()))
            });
            match ending {
                // A daemon that hands over ends its answers; the next one goes on with the same
                // numbers.
                Ok(Ending::Fabric) => {}
                Ok(_) => return Ok(Exit::Done),
                Err(error) if error.is_absent() => {
                    out::tell!("tombolo: {} is down", client.fabric());
                    return Ok(Exit::Done);
                }
                // As for one whose daemon was killed.
                Err(tombolo_host::api::client::ClientError::Broken { .. }) => {}
                Err(error) => return Err(error.into()),
            }
            if client.sleep(std::time::Duration::from_millis(200))? {
                return Ok(Exit::Done);
            }
        }
    }

    fn wants(&self, event: &EventReport) -> bool {
        (self.names.is_empty() || self.names.iter().any(|name| subjects(event).any(|of| of == name)))
            && (self.kind.is_empty() || self.kind.contains(&event.kind))
    }

    fn print(&self, events: &[EventReport]) -> Result<(), Failure> {
        let colour = out::colour();
        out::print(&events.iter().map(|event| self.line(event, colour)).collect::<String>())
    }

    fn line(&self, event: &EventReport, colour: bool) -> String {
        if self.json {
            // A report has only text and numbers.
            return serde_json::to_string(event).unwrap_or_default() + "\n";
        }
        let kind = format!("{:<9}", event.kind);
        let kind = match event.kind.as_str() {
            "death" | "fault" => toned(&kind, Tone::Bad, colour),
            "up" | "start" | "port-up" => toned(&kind, Tone::Good, colour),
            _ => kind,
        };
        let cause = event.cause.as_ref().map_or_else(String::new, |cause| format!(": {cause}"));
        // It may be of a file that somebody changed.
        let text = tombolo_host::log::shown(&format!("{}{cause}", event.text), 1000);
        format!("{}  {kind}  {text}\n", moment::rfc3339(event.unix_ms))
    }
}

/// The number of a line `{"lost": N}`.
fn lost(line: &[u8]) -> Option<u64> {
    serde_json::from_slice::<serde_json::Value>(line).ok()?.get("lost")?.as_u64()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        events: Events,
    }

    fn parse(line: &str) -> Result<Events, clap::Error> {
        Line::try_parse_from(["events"].into_iter().chain(line.split_whitespace())).map(|l| l.events)
    }

    fn event(kind: &str, name: &str, cause: Option<&str>) -> EventReport {
        EventReport {
            id: 3,
            unix_ms: 1_700_000_000_123,
            kind: kind.into(),
            name: Some(name.into()),
            network: Some("lan".into()),
            cause: cause.map(String::from),
            text: format!("{name} failed"),
            ..EventReport::default()
        }
    }

    #[test]
    fn events_are_chosen_by_name_kind_and_time() {
        let web = event("death", "web", None);
        assert!(parse("").unwrap().wants(&web) && parse("db web").unwrap().wants(&web));
        assert!(parse("lan --kind death --kind fault").unwrap().wants(&web));
        assert!(!parse("db").unwrap().wants(&web) && !parse("web --kind lease").unwrap().wants(&web));
        assert!(parse("--kind deaht").is_err() && parse("--last 0").is_err());
        assert!(parse("-F --json -n 5 --since -1h").unwrap().since.is_some());
        let Err(Failure::Said(Exit::Misused, text)) = since(Some("-1h")) else { panic!() };
        assert!(text.contains("--since: expected a span"), "{text}");
    }

    #[test]
    fn a_name_of_no_event_is_told_with_a_near_one() {
        let known = [event("start", "web", None)];
        assert_eq!(stranger("web", &known, || true), None);
        assert_eq!(stranger("lan", &known, || true), None);
        assert_eq!(
            stranger("wbe", &known, || false).unwrap(),
            "no event so far concerns \"wbe\"; did you mean \"web\"?"
        );
        assert_eq!(stranger("web2", &known, || true).unwrap(), "no event so far concerns \"web2\"");
        assert_eq!(stranger("nobody", &known, || false).unwrap(), "no event so far concerns \"nobody\"");
    }

    #[test]
    fn a_line_has_the_time_the_kind_and_the_cause() {
        let line = parse("").unwrap().line(&event("death", "web", Some("signal 9\u{1b}[2J")), false);
        assert_eq!(line, "2023-11-14T22:13:20.123Z  death      web failed: signal 9\\u{1b}[2J\n");
        let json = parse("--json").unwrap().line(&event("exit", "web", None), true);
        assert_eq!(serde_json::from_str::<EventReport>(&json).unwrap(), event("exit", "web", None));
        assert_eq!(lost(b"{\"lost\":12}\n"), Some(12));
        assert_eq!(lost(b"\n"), None);
    }
}
