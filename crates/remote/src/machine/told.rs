//! What exports and imports tell, as lines for a person or a log.

use std::fmt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::{ExportEvent, ImportEvent};

/// Lines about refused connections: at most one in this time, since strangers cause them.
const REFUSALS: Duration = Duration::from_secs(1);

impl fmt::Display for ExportEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExportEvent::Connected { machine, service } => write!(f, "{machine} uses {service}"),
            ExportEvent::Disconnected { machine, service } => write!(f, "{machine} has left {service}"),
            ExportEvent::Refused { from, why } => write!(f, "refused a connection from {from}: {why}"),
        }
    }
}

impl fmt::Display for ImportEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ImportEvent::Up { machine, round_trip } => {
                write!(f, "{machine} is there, {:.1} ms away", round_trip.as_secs_f64() * 1e3)
            }
            ImportEvent::Down { machine } => write!(f, "{machine} is gone"),
            ImportEvent::Failed { machine, why } => write!(f, "{machine}: {why}; it is tried again"),
            ImportEvent::Registered => write!(f, "the service is registered"),
            ImportEvent::Unregistered { why } => write!(f, "{why}; it is tried again"),
        }
    }
}

/// Tells the events of an export by `say`, refusals at most once in a second; those between are
/// counted.
pub fn told(say: impl Fn(&str) + Send + Sync + 'static) -> impl Fn(ExportEvent) + Send + Sync + 'static {
    let refusals = Mutex::new((None::<Instant>, 0u64));
    move |event| {
        let mut more = String::new();
        if matches!(event, ExportEvent::Refused { .. }) {
            let mut refusals = refusals.lock().unwrap_or_else(|e| e.into_inner());
            let (last, untold) = &mut *refusals;
            if last.is_some_and(|last| last.elapsed() < REFUSALS) {
                *untold += 1;
                return;
            }
            if *untold > 0 {
                more = format!(" ({untold} more before)");
            }
            (*last, *untold) = (Some(Instant::now()), 0);
        }
        say(&format!("{event}{more}"));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::machine::Origin;

    #[test]
    fn refusals_are_told_at_most_once_in_a_second() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let kept = lines.clone();
        let tell = told(move |line| kept.lock().unwrap().push(line.to_string()));
        let refused =
            || ExportEvent::Refused { from: Origin::Address(([192, 0, 2, 7], 1).into()), why: "no key".into() };
        tell(refused());
        tell(refused());
        tell(ExportEvent::Connected { machine: "a".into(), service: "calc".into() });
        assert_eq!(*lines.lock().unwrap(), ["refused a connection from 192.0.2.7:1: no key", "a uses calc"]);
    }
}
