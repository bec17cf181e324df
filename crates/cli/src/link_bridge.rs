//! `tombolo link-bridge`: what a daemon starts for a link with `service` or `to`; not for people,
//! who have `tombolo service bridge`.

use std::path::PathBuf;

use clap::Args;
use tombolo_host::bridge;

use crate::exit::{Exit, Failure};

#[derive(Args, Debug)]
pub(crate) struct LinkBridge {
    /// Where the link's server listens
    socket: PathBuf,
    /// Name under which the machine's service is registered here
    #[arg(long = "as", allow_hyphen_values = true)]
    service: Option<String>,
    /// Service of this machine that serves the link's machine
    #[arg(long, allow_hyphen_values = true)]
    to: Option<String>,
    /// Every user may call
    #[arg(long)]
    everybody: bool,
}

impl LinkBridge {
    pub(crate) fn run(self) -> Result<Exit, Failure> {
        Err(Failure::failed(bridge::run(&self.spec())))
    }

    pub(crate) fn spec(self) -> bridge::LinkSpec {
        let LinkBridge { socket, service, to, everybody } = self;
        bridge::LinkSpec { socket, service, to, everybody }
    }
}
