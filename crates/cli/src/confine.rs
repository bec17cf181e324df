//! `tombolo confine`: becomes a machine's QEMU, confined; not for people.

use std::path::PathBuf;

use clap::Args;
use tombolo_host::confine::{self, Writes};

use crate::exit::{Exit, Failure};

#[derive(Args, Debug)]
pub(crate) struct Confine {
    /// The fabric's runtime folder
    #[arg(long)]
    runtime: PathBuf,
    /// A file that it may write
    #[arg(long)]
    write: Vec<PathBuf>,
    /// The program and its arguments
    #[arg(last = true, required = true)]
    program: Vec<String>,
}

impl Confine {
    pub(crate) fn run(self) -> Result<Exit, Failure> {
        Err(Failure::failed(confine::program(&self.program, &Writes { runtime: self.runtime, files: self.write })))
    }
}
