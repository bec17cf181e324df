//! `tombolo keeper`: what a daemon starts beside itself; not for people.

use std::path::PathBuf;

use clap::Args;
use tombolo_host::fabric::fdstore;

use crate::exit::{Exit, Failure};

#[derive(Args, Debug)]
pub(crate) struct FdStore {
    /// Where the socket listens that is the standard input
    path: PathBuf,
}

impl FdStore {
    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        fdstore::keep(&self.path).map_err(Failure::failed)?;
        Ok(Exit::Done)
    }
}
