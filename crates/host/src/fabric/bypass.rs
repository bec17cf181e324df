//! The bypass of networks that ask for it: the host's tap and the ways out are attached in this
//! process's network namespace.
//!
//! It is a help and no part of the way: what cannot be attached is said, and traffic flows the
//! kernel's way. An interface may be another fabric's as well, or the user's own; it is detached
//! when the last of them lets it go. A killed daemon's taps are gone, its other interfaces stay
//! attached, and traffic flows; the owner record says so, and the next `up` or `down` takes them
//! back.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tombolo_bypass::attachment::{self, AttachError, Options};
use tombolo_bypass::place::{Place, Wanted};
use tombolo_bypass::{controller, report, warnings};

use super::{FabricError, Running, Say};
use crate::api::report::BypassReport;
use crate::blocking;
use crate::plan::{KernelUplink, Plan, kernel_device};
use crate::{file, routes, rundir};

fn place() -> Result<Place, FabricError> {
    Ok(Place::here(&rundir::runtime_root()?).map_err(AttachError::from)?)
}

/// The ways out of a network whose file names none.
fn outputs(named: &[String]) -> Vec<String> {
    if named.is_empty() { routes::host_default_devices() } else { named.to_vec() }
}

/// How often the daemon looks at the controller of its networks' bypass.
const LOOK: Duration = Duration::from_secs(5);

/// Has a controller that ended, is stopped or hangs replaced, until it is aborted. The lock of the
/// place may be waited for, so that is left to another thread.
async fn watch(place: Place, say: Say) {
    let mut told = String::new();
    loop {
        tokio::time::sleep(LOOK).await;
        let here = place.clone();
        let look = move || controller::lacks(&here).map(|why| (why, controller::start(&here)));
        let text = match blocking::spawn(look).await {
            Ok(Some((why, Ok(true)))) => format!("the bypass: {why}: another one was started"),
            Ok(Some((_, Ok(false)))) => {
                format!("the bypass: its controller did not start; see {}", place.log().display())
            }
            Ok(Some((why, Err(error)))) => format!("the bypass: {why}: another one could not be started: {error}"),
            Err(error) => format!("the bypass: its controller is not looked at: {error}"),
            Ok(None) => {
                told.clear();
                continue;
            }
        };
        if text != told {
            say(&text);
            told = text;
        }
    }
}

/// The bypass of the fabric's networks.
#[derive(Default)]
pub(crate) struct NetworksBypass {
    /// Networks whose bypass does not work, and why.
    faults: BTreeMap<String, String>,
    /// What has its controller replaced.
    watch: Option<tokio::task::JoinHandle<()>>,
}

impl NetworksBypass {
    /// Forgets why a network's bypass did not work.
    pub(crate) fn forget(&mut self, network: &str) {
        self.faults.remove(network);
    }

    /// Has a controller that ends replaced from now on.
    fn keep_controller(&mut self, place: &Place, say: &Say) {
        let watching = tokio::spawn(watch(place.clone(), say.clone()));
        self.watch.replace(watching).into_iter().for_each(|old| old.abort());
    }
}

impl Running {
    /// Attaches what the file asks for. What does not work is kept for the reports.
    pub(crate) fn start_bypass(&mut self, plan: &Plan) {
        self.bypass.faults.clear();
        for uplink in plan.kernel.iter().filter(|u| u.network.bypass.is_some()) {
            if let Err(error) = self.attach_bypass(uplink) {
                let (name, why) = (uplink.network.name.clone(), error.to_string());
                (self.say)(&format!("network {name}: no bypass, its traffic takes the kernel's path: {why}"));
                self.bypass.faults.insert(name, why);
            }
        }
    }

    fn attach_bypass(&mut self, uplink: &KernelUplink) -> Result<(), FabricError> {
        let fail = |why: &str| FabricError::Network { network: uplink.network.name.clone(), why: why.into() };
        let outputs = outputs(uplink.network.bypass.as_deref().unwrap_or_default());
        if outputs.is_empty() {
            return Err(fail("the host has no default route: name the outgoing interfaces, like bypass = [\"eth0\"]"));
        }
        if !rustix::process::geteuid().is_root() {
            return Err(fail("the bypass needs root (CAP_BPF, CAP_NET_ADMIN, CAP_PERFMON)"));
        }
        let place = place()?;
        self.dir().record(|o| o.bypass = true);
        let options = Options {
            wanted: Wanted::Auto,
            lease: None,
            past_filters: false,
            needs_keeper: None,
            skips_judging_rules: None,
            netns: String::new(),
            owner: self.spec.name.clone(),
        };
        let names: Vec<String> = std::iter::once(uplink.device.clone()).chain(outputs).collect();
        attachment::attach(&place, &names, &options)?;
        // Also where it does not start now: it is tried again.
        self.bypass.keep_controller(&place, &self.say);
        match controller::start(&place) {
            Ok(true) => Ok(()),
            Ok(false) => Err(fail(&format!("its controller did not start; see {}", place.log().display()))),
            Err(error) => Err(fail(&format!("its controller did not start: {error}"))),
        }
    }

    /// Releases everything that was attached for this fabric, by this daemon or one before it.
    pub(crate) fn end_bypass(&mut self) -> Result<(), FabricError> {
        self.bypass.watch.take().into_iter().for_each(|task| task.abort());
        if self.dir.as_ref().is_none_or(|d| !d.owner().bypass) {
            return Ok(());
        }
        let detached = attachment::release(&place()?, &self.spec.name)?;
        if let Some(left) = detached.unchecked_text() {
            (self.say)(&format!("the bypass: {left}"));
        }
        self.dir().record(|o| o.bypass = false);
        Ok(())
    }

    pub(crate) fn bypass_report(&self, network: &file::Network) -> Option<BypassReport> {
        let outputs = outputs(network.bypass.as_deref()?);
        let mut fault = self.bypass.faults.get(&network.name).cloned();
        let tap = kernel_device(&self.spec.name, &network.name);
        let names: BTreeSet<String> = outputs.into_iter().chain([tap]).collect();
        let found = place().and_then(|place| Ok(report::report(&place, report::Detail::Glance)?));
        let (interfaces, warnings): (Vec<_>, Vec<_>) = match found {
            Ok(mut report) => {
                report.interfaces.retain(|i| names.contains(&i.name));
                let mut warnings = warnings::of(&report);
                // It is the fault already.
                if report.keeper_fault.is_some() {
                    warnings.retain(|w| w.kind != "keeper");
                }
                fault = fault.or(report.keeper_fault);
                let interfaces = report.interfaces.into_iter().map(Into::into).collect();
                (interfaces, warnings.iter().map(ToString::to_string).collect())
            }
            Err(error) => {
                fault.get_or_insert(error.to_string());
                (vec![], vec![])
            }
        };
        if interfaces.is_empty() {
            fault.get_or_insert("another process detached it; `tombolo down` and `tombolo up` attach it again".into());
        }
        Some(BypassReport { fault, interfaces, warnings })
    }
}
