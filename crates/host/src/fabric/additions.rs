//! Members that are added to a fabric while it runs, and taken out of it again.

use std::path::Path;

use super::ending::Ending;
use super::events::{Facts as Told, Kind};
use super::facts::NOT_ASKED;
use super::{FabricError, Running, Say};
use crate::file::{self, Fabric, FileError};
use crate::plan;
use crate::preflight;
use crate::rundir::{Addition, RunDir};

impl Running {
    /// Adds members: the text of sections of a fabric file. Starts them and returns their names.
    ///
    /// # Errors
    /// The sections' faults, or what did not work; then nothing was added.
    pub fn add(&mut self, text: &str) -> Result<Vec<String>, FabricError> {
        let spec = file::add(text, Path::new("request"), &self.spec)?;
        if let Some(name) = spec.members().find(|name| self.unadded.contains(*name)) {
            return Err(FabricError::Busy(format!(
                "\"{name}\" of an earlier try is being ended; try again in a few seconds"
            )));
        }
        let same = spec.networks.len() == self.spec.networks.len()
            && spec.links.len() == self.spec.links.len()
            && spec.exports.len() == self.spec.exports.len()
            && spec.imports.len() == self.spec.imports.len()
            && spec.rules.len() == self.spec.rules.len()
            && spec.mirrors.len() == self.spec.mirrors.len()
            && spec.name == self.spec.name;
        if !same {
            let text = "only [cell.…], [vm.…], [tap.…] and [port.…], and [[forward]] to these, can be added to a running \
                fabric; for the rest change the file and restart the fabric";
            return Err(FabricError::State(text.into()));
        }
        let mut facts = self.facts.clone();
        let wants_xl = facts.xl.is_err() && spec.machines.iter().any(|m| m.attach == file::Attach::Xen);
        if (facts.qemu.is_err() || facts.kvm == Err(NOT_ASKED.into()) || wants_xl) && !spec.machines.is_empty() {
            facts = super::facts(&spec, facts.runtime);
        }
        let names: Vec<String> =
            spec.members().filter(|n| !self.spec.members().any(|m| m == *n)).map(String::from).collect();
        self.can_be_called(&spec, &names)?;
        let forwards = &spec.forwards[self.spec.forwards.len()..];
        self.can_forward(&spec, forwards, &names)?;
        let forwards = !forwards.is_empty();
        let plan = plan::plan(&spec, &facts)?;
        let ports: Vec<_> = plan.ports.iter().filter(|p| !self.ports.contains_key(&p.name)).cloned().collect();
        let machines: Vec<_> = plan.machines.iter().filter(|m| names.contains(&m.name)).cloned().collect();
        let old = (std::mem::replace(&mut self.spec, spec), std::mem::replace(&mut self.facts, facts));
        let addition = Addition { names: names.clone(), text: text.into() };
        self.dir().record(|o| o.additions.push(addition));
        let made = self.start_links(&plan).and_then(|()| {
            ports.iter().try_for_each(|port| self.add_port(port))?;
            self.update_names();
            if forwards {
                self.forwards_again()?;
            }
            machines.iter().try_for_each(|machine| self.start_or_wait(machine))
        });
        if let Err(error) = made {
            for port in &ports {
                self.drop_port(&port.name);
            }
            for name in &names {
                let Some(mut machine) = self.machines.remove(name) else { continue };
                let (process, domain) = (machine.let_go(), machine.plan.domain.clone());
                if domain.is_some() {
                    self.end_unadded(name, Ending { process, button: None, domain });
                } else if let Some(process) = process {
                    // It has run for an instant only; nothing in it is worth a grace.
                    let _ = process.signal(rustix::process::Signal::KILL);
                }
            }
            (self.spec, self.facts) = old;
            self.update_names();
            if forwards && let Err(error) = self.forwards_again() {
                (self.say)(&format!("the rules of before cannot be put back: {error}"));
            }
            self.dir().record(|o| {
                o.additions.pop();
            });
            return Err(error);
        }
        self.note_containers();
        self.record_standing();
        let text = format!("{} added to the running fabric", was(&names));
        names.iter().for_each(|name| self.events.add(Kind::Apply, Told::of(name), &text));
        Ok(names)
    }

    /// Whether forwards can be added to what runs, those behind `[[forward]]` of an addition with
    /// these members.
    ///
    /// # Errors
    /// One to something else, one through an uplink that would have to start again for it, or one
    /// where another program listens.
    fn can_forward(&self, spec: &Fabric, forwards: &[file::Forward], names: &[String]) -> Result<(), FabricError> {
        let mut others = None;
        for forward in forwards {
            let (proto, listen) = (forward.proto, forward.listen);
            let it = format!("the forward of {} {listen}", proto.word());
            let own = matches!(&forward.target, file::Target::Name(name) if names.contains(name));
            if !own {
                let text = format!(
                    "{it}: expected to lead to a member that is added with it; `tombolo forward add` makes others"
                );
                return Err(FabricError::State(text));
            }
            if spec.network(&forward.network).is_none_or(|network| network.uplink != file::Uplink::Kernel) {
                let text = format!(
                    "{it}: network \"{}\" has no uplink \"kernel\", the only one that takes forwards while it runs: give \
                     it that uplink, or add the forward by `tombolo forward add` or to the file (`tombolo apply`)",
                    forward.network
                );
                return Err(FabricError::State(text));
            }
            let others = others.get_or_insert_with(|| crate::kernel::listeners_of_others(&self.spec.name));
            let forwarded = preflight::forwarded_by(others, proto, listen);
            let taken = preflight::free_in_family(proto, listen).err().or(forwarded);
            if let Some(preflight::Taken { found, hint, .. }) = taken {
                return Err(FabricError::State(format!("the forward of {found}; {hint}")));
            }
        }
        Ok(())
    }

    /// Forgets that a member was added; whether it was.
    pub(crate) fn forget_addition(&mut self, name: &str) -> Result<bool, FabricError> {
        let known = self.dir().owner().additions.iter().any(|a| a.names.iter().any(|n| n == name));
        if known {
            self.dir().record(|o| {
                for addition in &mut o.additions {
                    addition.names.retain(|n| n != name);
                }
                o.additions.retain(|a| !a.names.is_empty());
            });
            self.forget_rates(name);
        }
        Ok(known)
    }

    /// Removes a tap or bare port.
    ///
    /// # Errors
    /// If there is none of that name, or it belongs to a machine or the fabric itself.
    pub fn remove(&mut self, name: &str) -> Result<(), FabricError> {
        if name.strip_prefix("gateway-").is_some_and(|network| self.networks.contains_key(network)) {
            let text = format!("port \"{name}\" is the gateway of its network, which only `down` ends");
            return Err(FabricError::State(text));
        }
        let Some(port) = self.ports.get(name) else { return Err(self.unknown("port", name)) };
        if let Some(machine) = &port.plan.machine {
            let text = format!(
                "port \"{name}\" belongs to the machine \"{machine}\"; `tombolo cell stop {machine}` ends that"
            );
            return Err(FabricError::State(text));
        }
        if let Some(network) = name
            .strip_prefix("span-")
            .filter(|network| self.spec.here.is_some() && self.networks.contains_key(*network))
            .filter(|_| self.spec.ports.iter().any(|p| p.name == name && matches!(p.kind, file::PortKind::Vxlan(_))))
        {
            let text = format!(
                "port \"{name}\" is the tunnel to the other machines, which network \"{network}\" has as long as it has `span`"
            );
            return Err(FabricError::State(text));
        }
        let own = self.spec.taps.iter().any(|t| t.name == name) || self.spec.ports.iter().any(|p| p.name == name);
        if !own {
            return Err(FabricError::State(format!(
                "port \"{name}\" is the uplink of its network, which only `down` ends"
            )));
        }
        let target = file::Target::Name(name.into());
        let added = self.dir().owner().additions.iter().any(|a| a.names.iter().any(|n| n == name));
        let forward = self.spec.forwards.iter().find(|f| f.target == target);
        // Those that were added with it go with it. So do those of a container, which has ended.
        let contained = self.spec.contained().any(|member| member.name == name);
        let forwards = forward.is_some() && (added || contained);
        if let Some(forward) = forward.filter(|_| !forwards) {
            let text = format!(
                "port \"{name}\" is the target of the forward from {}; it cannot go before that",
                forward.listen
            );
            return Err(FabricError::State(text));
        }
        // A container has ended, whatever names it.
        if !added && !contained {
            self.can_remove(name)?;
        }
        if forwards {
            // First, since it alone can fail: then the port stays as it was, with its forwards.
            let before = self.spec.forwards.clone();
            self.spec.forwards.retain(|f| f.target != target);
            if let Err(error) = self.forwards_again() {
                self.spec.forwards = before;
                return Err(error);
            }
        }
        self.drop_port(name);
        self.spec.taps.retain(|t| t.name != name);
        self.spec.ports.retain(|p| p.name != name);
        self.update_names();
        self.forget_container(name);
        if !self.forget_addition(name)? {
            self.note_removed(name, contained);
        }
        self.forget_rates(name);
        self.record_standing();
        let text = format!("port {name} was removed from the running fabric");
        self.events.add(Kind::Apply, Told::of(name), &text);
        Ok(())
    }
}

/// Applies what was added to the fabric while an earlier daemon ran. What no longer fits is said
/// and left out.
pub(super) fn restore_additions(
    spec: Fabric,
    additions: &[Addition],
    dir: &mut RunDir,
    say: &Say,
) -> Result<Fabric, FabricError> {
    let mut misfits = Vec::new();
    let out = restore_additions_of(spec, additions, &mut |addition, error| {
        say(&format!("{} was added before and no longer fits: {error}", addition.names.join(", ")));
        misfits.push(addition.clone());
    });
    if !misfits.is_empty() {
        dir.record(|o| o.additions.retain(|a| !misfits.contains(a)));
    }
    Ok(out)
}

/// As [`restore_additions`]; `misfit` is told what no longer fits.
pub(super) fn restore_additions_of(
    spec: Fabric,
    additions: &[Addition],
    misfit: &mut dyn FnMut(&Addition, &FileError),
) -> Fabric {
    let mut out = spec;
    for addition in additions {
        match file::add(&addition.text, Path::new("added"), &out) {
            Ok(mut more) => {
                // Of several that were added at once some may have been removed since.
                let old: Vec<String> = out.members().map(String::from).collect();
                let keep = |name: &String| old.contains(name) || addition.names.contains(name);
                more.machines.retain(|m| keep(&m.name));
                more.taps.retain(|t| keep(&t.name));
                more.ports.retain(|p| keep(&p.name));
                more.forwards.retain(|f| !matches!(&f.target, file::Target::Name(name) if !keep(name)));
                out = more;
            }
            Err(error) => misfit(addition, &error),
        }
    }
    out
}

/// `web was`, or `a, b and c were`, for what follows.
fn was(names: &[String]) -> String {
    match names {
        [] => "nothing was".into(),
        [one] => format!("{one} was"),
        [first @ .., last] => format!("{} and {last} were", first.join(", ")),
    }
}
