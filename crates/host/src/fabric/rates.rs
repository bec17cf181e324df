//! Rate limits that change while a port runs.
//!
//! A change is kept in the owner record, by the port's name, and goes before the file's `rate`: a
//! machine that is started again has it, and so has a daemon that follows a crash or takes over. It
//! ends with the port that it is of, with `down`, and with a start from another file.

use std::path::Path;

use super::events::{Facts, Kind};
use super::{FabricError, Running};
use crate::file;
use tombolo_switch::limit::Rates;

impl Running {
    /// Gives a running port other rate limits: `text` is the key `rate` of a fabric file.
    ///
    /// # Errors
    /// The text's faults; no such port, or one that is the fabric's own; a worker that has ended.
    /// Then nothing has changed.
    pub fn set_rates(&mut self, name: &str, text: &str) -> Result<(), FabricError> {
        let rates = file::rate_change(text, Path::new("request"))?;
        if name.strip_prefix("gateway-").is_some_and(|network| self.networks.contains_key(network)) {
            return Err(own(name, "gateway"));
        }
        let Some(port) = self.ports.get(name) else { return Err(self.unknown("port", name)) };
        let member = port.plan.machine.is_some()
            || self.spec.taps.iter().any(|t| t.name == name)
            || self.spec.ports.iter().any(|p| p.name == name);
        if !member {
            return Err(own(name, "uplink"));
        }
        let worker = self.workers.get(port.worker);
        let worker = worker.ok_or_else(|| FabricError::State(format!("port \"{name}\": its worker is not there")))?;
        worker.thread.handle().set_limits(port.token, port.plan.traffic.storm, rates)?;
        self.dir().record(|o| {
            o.rates.insert(name.into(), text.into());
        });
        (self.say)(&format!("port {name}: its rate limits are changed: {}", text.trim()));
        let what = format!("the rate limits of port {name} were changed");
        self.events.add(Kind::Apply, Facts { cause: Some(text.trim().into()), ..Facts::of(name) }, &what);
        Ok(())
    }

    /// The limits that a port was given while it ran.
    pub(crate) fn changed_rates(&self, name: &str) -> Option<Rates> {
        let text = self.dir.as_ref()?.owner().rates.get(name)?;
        match file::rate_change(text, Path::new("changed")) {
            Ok(rates) => Some(rates),
            Err(error) => {
                (self.say)(&format!(
                    "port {name}: its rate limits were changed before, to what this version does not read: {error}"
                ));
                None
            }
        }
    }

    /// Forgets what a member's ports were given: a machine's are `NAME`, `NAME.1` and so on.
    pub(crate) fn forget_rates(&mut self, name: &str) {
        let of_it = |port: &String| port.split('.').next() == Some(name);
        if self.dir().owner().rates.keys().any(of_it) {
            self.dir().record(|o| o.rates.retain(|port, _| !of_it(port)));
        }
    }
}

fn own(name: &str, what: &str) -> FabricError {
    FabricError::State(format!(
        "port \"{name}\" is the {what} of its network, which has no rate limits; expected the port of a cell or VM, a tap or a \
         port of the file: set limits there"
    ))
}
