//! `tombolo domain-watch`: what a daemon starts for a domain of Xen that was restored; not for
//! people.

use std::path::PathBuf;

use clap::Args;
use tombolo_host::xen::watcher;

use crate::exit::{Exit, Failure};

#[derive(Args, Debug)]
pub(crate) struct DomainWatch {
    /// Number of the domain
    domain: u32,
    /// The configuration that the machine's `xl` was given
    config: PathBuf,
}

impl DomainWatch {
    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        watcher::run(self.domain, &self.config).map_err(Failure::failed)?;
        Ok(Exit::Done)
    }
}
