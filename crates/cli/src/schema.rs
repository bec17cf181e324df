//! `tombolo schema`: the JSON Schema of the fabric file, for editors.

use clap::Args;
use tombolo_host::file::json_schema::json_schema;

use crate::exit::{Exit, Failure};
use crate::out;

const EXAMPLES: &str = "\
An editor that knows the schema completes keys, explains them and marks faults. In Visual Studio Code (Even Better TOML),
Helix and others with taplo, the first line of a fabric file names it:

  #:schema /usr/share/tombolo/tombolo.schema.json

Examples:
  tombolo schema > tombolo.schema.json
  tombolo schema | jq -r '.definitions.cell.properties | keys[]'";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Schema {}

impl Schema {
    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        out::json(&json_schema())?;
        Ok(Exit::Done)
    }
}
