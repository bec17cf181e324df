//! `tombolo check`: every fault of a fabric file and of what it needs of this machine, before
//! anything is started.

use std::path::{Path, PathBuf};

use clap::Args;
use serde::Serialize;
use tombolo_host::fabric;
use tombolo_host::fabric::standing::{self, Standing};
use tombolo_host::file::{self, FileError, Problem, Which};
use tombolo_host::{preflight, rundir};

use crate::exit::{Exit, Failure};
use crate::out;
use crate::select::{OfMachine, Select};

#[derive(Args, Debug)]
pub(crate) struct Check {
    /// Fabric file [default: that of --file, else tombolo.toml, else that of the running fabric]
    #[arg(value_name = "FILE", conflicts_with = "file")]
    path: Option<PathBuf>,
    #[command(flatten)]
    of: OfMachine,
    /// Print the faults as JSON
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report<'a> {
    schema: u32,
    file: String,
    /// The fabric's name; null where the file does not say it.
    fabric: Option<String>,
    faults: Vec<Fault<'a>>,
}

#[derive(Debug, Serialize)]
struct Fault<'a> {
    /// "file" or "machine": what has to change.
    of: &'a str,
    line: usize,
    column: usize,
    key: &'a str,
    expected: &'a str,
    found: &'a str,
    hint: Option<&'a str>,
}

/// What the fabric of that name has already, where it runs.
fn standing_of(name: &str) -> Option<Standing> {
    standing::of_running(&rundir::runtime_root().ok()?.join(name))
}

impl Check {
    pub(crate) fn run(&self, select: &Select) -> Result<Exit, Failure> {
        let path = select.fabric_file(self.path.as_ref())?;
        // Without a named one the file is checked all the same, for all of its machines.
        let which = self.of.machine.as_deref().map_or(Which::Any, Which::Named);
        let text = match file::text_of(&path) {
            Err(FileError::Faulty { problems, .. }) if self.json => {
                return self.report(&path, None, &problems, Exit::Misused);
            }
            read => read?,
        };
        let (spec, places) = match file::parse_with_places(text.clone(), &path, which) {
            Ok(read) => read,
            Err(FileError::Faulty { problems, .. }) if self.json => {
                let found = preflight::of_readable(&text, &path, which, standing_of);
                let all = problems.iter().chain(&found);
                return self.report(&path, file::name_of(&path, which).ok(), all, Exit::Misused);
            }
            Err(error) => return Err(preflight::beside(error, &text, which, standing_of).into()),
        };
        if let Some(here) = spec.here.as_ref().filter(|here| !here.is_chosen) {
            if self.json {
                return self.report(&path, None, [], Exit::Done);
            }
            out::print(&format!(
                "{}: no faults in the file, on each of its {}; what it needs of a machine is checked with --machine NAME\n",
                path.display(),
                out::counted(1 + here.others.len(), "machine"),
            ))?;
            return Ok(Exit::Done);
        }
        let folder = rundir::runtime_root()?.join(&spec.name);
        let facts = fabric::facts(&spec, folder.clone());
        let standing = standing_of(&spec.name);
        let mut faults = preflight::faults(&spec, standing.as_ref());
        faults.extend(preflight::plan_faults(&spec, &facts));
        let error = places.error(faults.into_iter().map(|fault| fault.placed(&places)).collect());
        let FileError::Faulty { problems, .. } = &error else { return Err(error.into()) };
        if self.json {
            let exit = if problems.is_empty() { Exit::Done } else { Exit::Failed };
            return self.report(&path, Some(spec.name), problems, exit);
        }
        if !problems.is_empty() {
            return Err(Failure::failed(error.to_string()));
        }
        out::print(&format!(
            "{}: no faults: {}, {}, {}, {}, {}\n",
            path.display(),
            out::counted(spec.networks.len(), "network"),
            out::counted(spec.machines.len(), "machine"),
            out::counted(spec.taps.len(), "tap"),
            out::counted(spec.ports.len(), "port"),
            out::counted(spec.forwards.len(), "forward"),
        ))?;
        Ok(Exit::Done)
    }

    fn report<'p>(
        &self,
        path: &Path,
        fabric: Option<String>,
        problems: impl IntoIterator<Item = &'p Problem>,
        exit: Exit,
    ) -> Result<Exit, Failure> {
        let faults = problems.into_iter().map(|p| Fault {
            of: p.of.word(),
            line: p.line,
            column: p.column,
            key: &p.key,
            expected: &p.expected,
            found: &p.found,
            hint: p.hint.as_deref(),
        });
        let file = path.display().to_string();
        out::json(&Report { schema: 1, file, fabric, faults: faults.collect() })?;
        Ok(exit)
    }
}
