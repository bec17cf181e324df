//! `tombolo down`.

use clap::Args;
use tombolo_host::daemon;

use crate::exit::{Exit, Failure};
use crate::select::Select;

#[derive(Args, Debug)]
pub(crate) struct Down {}

impl Down {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let client = select.client()?;
        let name = client.fabric().to_string();
        match client.down() {
            Ok(()) => Ok(Exit::Done),
            Err(error) if error.is_absent() => match daemon::clean_up(&name)? {
                true => {
                    eprintln!("tombolo: {name} did not run any more; what its killed daemon had left is cleared up");
                    Ok(Exit::Done)
                }
                false => Err(error.into()),
            },
            Err(error) => Err(error.into()),
        }
    }
}
