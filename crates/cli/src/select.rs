//! Which fabric is meant.

use std::path::{Path, PathBuf};

use clap::Args;
use tombolo_host::api::client::Client;
use tombolo_host::file::Which;
use tombolo_host::{file, rundir};

use crate::exit::Failure;

/// The file that is meant where none is named.
pub(crate) const DEFAULT_FILE: &str = "tombolo.toml";

#[derive(Args, Debug, Default)]
pub(crate) struct Select {
    /// Name of the fabric to use
    #[arg(
        long,
        global = true,
        value_name = "NAME",
        env = "TOMBOLO_FABRIC",
        hide_env_values = true,
        conflicts_with = "file"
    )]
    pub(crate) fabric: Option<String>,
    /// Use the fabric that this file describes
    #[arg(short, long, global = true, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}

/// Which machine of a fabric file for several.
#[derive(Args, Debug, Default)]
pub(crate) struct OfMachine {
    /// Machine of a fabric file for several [default: the only one, or the one with this host's
    /// name]
    #[arg(long, value_name = "NAME")]
    pub(crate) machine: Option<String>,
}

impl OfMachine {
    pub(crate) fn which(&self) -> Which<'_> {
        Which::of(self.machine.as_deref())
    }
}

impl Select {
    /// The fabric's name, that of a machine where one is named.
    pub(crate) fn name_on(&self, root: &Path, of: &OfMachine) -> Result<String, Failure> {
        if of.machine.is_none() {
            return self.name_of_this(root);
        }
        let path = self.file.as_deref().unwrap_or(Path::new(DEFAULT_FILE));
        let name = file::name_of(path, of.which())?;
        match &self.fabric {
            Some(fabric) if *fabric != name => Err(Failure::misused(format!(
                "--machine: expected a machine of the fabric \"{fabric}\", but {} makes it \"{name}\"",
                path.display()
            ))),
            _ => Ok(name),
        }
    }

    /// The fabric's name, for a command without `--machine`.
    pub(crate) fn name(&self, root: &Path) -> Result<String, Failure> {
        let with_hint = |failure| match failure {
            Failure::Said(exit, text) => {
                let hint = "name the fabric of this machine: --fabric NAME-MACHINE";
                Failure::Said(exit, text.replace(file::SAY_WHICH, hint))
            }
            other => other,
        };
        self.name_of_this(root).map_err(with_hint)
    }

    /// The fabric's name; what is said of a machine that is not known is to name it.
    fn name_of_this(&self, root: &Path) -> Result<String, Failure> {
        if let Some(name) = &self.fabric {
            // It becomes a piece of a path.
            if name.is_empty() || !name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') {
                return Err(Failure::misused(format!(
                    "--fabric: expected the name of a fabric (a-z, 0-9 and -), found {name:?}; a file is given with --file"
                )));
            }
            return Ok(name.clone());
        }
        if let Some(file) = &self.file {
            return Ok(file::name_of(file, Which::This)?);
        }
        if Path::new(DEFAULT_FILE).exists() {
            return Ok(file::name_of(Path::new(DEFAULT_FILE), Which::This)?);
        }
        let running = rundir::running(root);
        match running.as_slice() {
            [one] => Ok(one.clone()),
            [] => Err(Failure::failed(match rundir::left(root).as_slice() {
                [] => format!(
                    "no fabric runs (looked in {}), and there is no ./{DEFAULT_FILE}; `tombolo up FILE` starts one",
                    root.display()
                ),
                left @ [first, ..] => format!(
                    "no fabric runs, but there is what the daemon of {} left that was killed or stopped: `tombolo up` with its \
                     file starts the next one, and `tombolo down --fabric {first}` ends what is left",
                    left.join(" and of ")
                ),
            })),
            several => Err(Failure::misused(format!(
                "which fabric? These run: {}; name one with --fabric",
                several.join(", ")
            ))),
        }
    }

    /// The fabric file of a command: the one that it names, else ./tombolo.toml, else that of the
    /// running fabric.
    pub(crate) fn fabric_file(&self, named: Option<&PathBuf>) -> Result<PathBuf, Failure> {
        if let Some(path) = named.or(self.file.as_ref()) {
            return Ok(path.clone());
        }
        let here = PathBuf::from(DEFAULT_FILE);
        if here.exists() {
            return Ok(here);
        }
        let root = rundir::runtime_root()?;
        match &self.fabric {
            None if rundir::running(&root).len() != 1 => Ok(here),
            _ => Ok(client_of(&root, &self.name(&root)?)?.config()?.file),
        }
    }

    /// A client of the fabric.
    pub(crate) fn client(&self) -> Result<Client, Failure> {
        let root = rundir::runtime_root()?;
        client_of(&root, &self.name(&root)?)
    }

    /// A client of the fabric, on a machine where one is named.
    pub(crate) fn client_on(&self, of: &OfMachine) -> Result<Client, Failure> {
        let root = rundir::runtime_root()?;
        client_of(&root, &self.name_on(&root, of)?)
    }
}

fn client_of(root: &Path, name: &str) -> Result<Client, Failure> {
    Ok(Client::new(name, &rundir::api_socket(root, name))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn by_name(name: &str) -> Select {
        Select { fabric: Some(name.into()), file: None }
    }

    #[test]
    fn a_name_is_taken_as_it_is_and_a_path_is_not_a_name() {
        let root = Path::new("/nowhere");
        assert_eq!(by_name("demo").name(root).unwrap(), "demo");
        for wrong in ["", "../x", "tombolo.toml", "Demo"] {
            assert!(by_name(wrong).name(root).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_file_gives_its_name_even_if_it_is_faulty() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.toml");
        std::fs::write(&path, "name = \"demo\"\n[netwrok.lan]\n[cell.x]\n").unwrap();
        let select = Select { fabric: None, file: Some(path.clone()) };
        assert_eq!(select.name(dir.path()).unwrap(), "demo");
        std::fs::write(&path, "name = \"demo\"\n[machine.a]\n[machine.b]\n[cell.x]\n").unwrap();
        let of = |name: &str| OfMachine { machine: Some(name.into()) };
        assert_eq!(select.name_on(dir.path(), &of("b")).unwrap(), "demo-b");
        assert!(select.name_on(dir.path(), &of("c")).is_err());
        let other = Select { fabric: Some("demo-a".into()), file: Some(path.clone()) };
        assert!(other.name_on(dir.path(), &of("b")).is_err() && other.name_on(dir.path(), &of("a")).is_ok());
        std::fs::remove_file(path).unwrap();
        assert!(select.name(dir.path()).is_err());
    }
}
