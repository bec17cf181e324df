//! Services that cross machines over zenoh: the exports and imports of the settings.
//!
//! They are those of `tombolo service export` and `import` ([`tombolo_remote::machine`]), with the
//! engine of [`crate::streams`] in place of TCP. So TLS, deadlines, order, admission, cancellation
//! and the choice between machines are the same. They do not depend on the daemon.

use std::sync::Arc;

use tombolo_remote::RemoteError;
use tombolo_remote::machine::keys::{Identity, KeyFiles};
use tombolo_remote::machine::{Export, Exporter, Import, Importer, Offer, Pick, Remote, told};
use tombolo_rpc::folder;
use tombolo_rpc::provider::Access;

use crate::options::{Callers, Options, SharedService};
use crate::say;
use crate::streams::{Streams, Zenoh};

/// Calls of an import that are passed on at a time, as `tombolo service import` has it.
const WORKERS: u32 = 16;

/// What the settings say.
pub struct Services {
    export: Option<Export>,
    imports: Vec<Import>,
    identity: Option<Identity>,
}

/// Services that cross, until it is dropped.
pub struct Crossing {
    imports: Vec<Importer>,
    export: Option<Exporter>,
    streams: Arc<Streams>,
}

/// The machines that may call an exported service. All are the other machines, and not everything
/// that has a certificate of the same authority: a router has one too. Without keys nothing tells
/// machines apart.
fn allowed(export: &SharedService, options: &Options, has_keys: bool) -> Vec<String> {
    match export.machines.is_empty() && has_keys {
        true => options.peers.iter().map(|peer| peer.name.clone()).collect(),
        false => export.machines.clone(),
    }
}

impl Services {
    /// What the settings say; reads the keys, if they are needed.
    ///
    /// # Errors
    /// Keys or a place for the services' sockets are missing, in words.
    pub fn of(options: &Options) -> Result<Services, String> {
        let Options { machine, exports, imports, keys, callers, .. } = options;
        let has_any = !exports.is_empty() || !imports.is_empty();
        let files = keys.as_ref().filter(|_| has_any).map(|keys| KeyFiles::of(keys, machine));
        let identity = files.map(|files| Identity::load(&files)).transpose().map_err(|error| error.to_string())?;
        if has_any {
            folder::services().map_err(|error| error.to_string())?;
        }
        let offers = exports.iter().map(|export| Offer {
            service: export.service.clone(),
            allow: allowed(export, options, identity.is_some()),
        });
        let export = Export { offers: offers.collect(), ..Export::default() };
        let access = Access { everybody: *callers == Callers::Everybody, ..Access::default() };
        let import = |service: &str, machines: &[String]| Import {
            service: service.into(),
            name: service.into(),
            // The engine finds a machine by its name.
            remotes: machines.iter().map(|name| Remote { machine: name.clone(), address: name.clone() }).collect(),
            pick: Pick::default(),
            workers: WORKERS,
            access: access.clone(),
            folder: None,
        };
        let imports = imports.iter().map(|shared| import(&shared.service, &shared.machines)).collect();
        Ok(Services { export: (!exports.is_empty()).then_some(export), imports, identity })
    }

    /// Begins.
    ///
    /// # Errors
    /// The system refused a thread, or the folder of services, in words.
    pub fn start(self, streams: Arc<Streams>) -> Result<Crossing, String> {
        let words = |error: RemoteError| error.to_string();
        let engine = Zenoh(streams.clone());
        let mut crossing = Crossing { imports: Vec::new(), export: None, streams };
        if let Some(export) = self.export {
            crossing.export = Some(export.start(&engine, self.identity.clone(), told(say)).map_err(words)?);
        }
        if !self.imports.is_empty() {
            let services = folder::services().map_err(|error| error.to_string())?;
            folder::make(&services).map_err(|error| format!("making {}: {error}", services.display()))?;
        }
        for import in self.imports {
            let name = import.name.clone();
            let tell = move |event| say(&format!("{name}: {event}"));
            crossing.imports.push(import.start(Arc::new(engine.clone()), self.identity.clone(), tell).map_err(words)?);
        }
        Ok(crossing)
    }
}

impl Drop for Crossing {
    fn drop(&mut self) {
        self.streams.stop();
        self.imports.clear();
        self.export = None;
        // The other machines hear of it before the session ends.
        self.streams.finish();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{export, peer};

    #[test]
    fn an_export_for_all_is_for_the_other_machines_and_not_for_a_router() {
        let mut options = Options {
            fabric: "f".into(),
            machine: "a".into(),
            listen: None,
            peers: vec![peer("b").unwrap(), peer("c").unwrap()],
            routers: vec![peer("hub=192.0.2.9:7447").unwrap()],
            exports: vec![],
            imports: vec![],
            callers: Callers::Everybody,
            keys: None,
            site: "s".into(),
            lease: 5,
        };
        options.exports = vec![export("calc").unwrap(), export("time=b").unwrap()];
        assert_eq!(allowed(&options.exports[0], &options, true), ["b", "c"]);
        assert_eq!(allowed(&options.exports[1], &options, true), ["b"]);
        assert!(allowed(&options.exports[0], &options, false).is_empty(), "without keys names prove nothing");
    }
}
