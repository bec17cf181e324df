//! `tombolo lab`: finds the lab, a Python package, and becomes it.
//!
//! The package is the folder `lab` of the repository. It is looked for in `$TOMBOLO_LAB`; in the
//! checkout that this program was built in, if the program lies in a `target` folder; and in
//! `../share/tombolo/lab` beside the program. The interpreter is the first of `python3` in PATH and
//! `/usr/bin/python3` that has the libraries of the lab, which Debian packages: a Python of one's
//! own in PATH often lacks them. Without them the lab still measures; only its reports need them.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;
use tombolo_host::environment::variable;

use crate::exit::{Exit, Failure};
use crate::out;

/// A file that every version of the lab has.
const MARK: &str = "tombolo_lab/__init__.py";
/// Where Debian installs its interpreter, which has Debian's libraries.
const DEBIAN_PYTHON: &str = "/usr/bin/python3";
/// The libraries of statistics and reports. Debian's package of each is `python3-NAME`.
const LIBRARIES: [&str; 6] = ["numpy", "pandas", "scipy", "statsmodels", "matplotlib", "jinja2"];
/// Ends with 3 where Python is too old for the lab; otherwise prints the libraries that are
/// missing.
const PROBE: &str = "\
import sys
if sys.version_info < (3, 11): sys.exit(3)
from importlib.util import find_spec
print(*[name for name in sys.argv[1:] if find_spec(name) is None])";

const AFTER: &str = "\
Commands: ls, show NAME, run NAME, report DIR, compare A B, copy NAME FILE. Each has --help.

It needs python3, 3.11 or later; reports need the libraries that ./x setup lab installs:
apt-get install python3-pandas python3-scipy python3-statsmodels python3-matplotlib python3-jinja2

Exit codes: 0 good, 1 a point failed or nothing was measured, 2 used wrongly, 130 interrupted.";

#[derive(Args, Debug)]
#[command(disable_help_flag = true, after_help = AFTER)]
pub(crate) struct Lab {
    /// Command of the lab and its arguments, passed on as they are: `tombolo lab --help` lists them
    #[arg(value_name = "ARGUMENT", trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) arguments: Vec<OsString>,
}

impl Lab {
    pub(crate) fn run(self) -> Result<Exit, Failure> {
        let program = std::env::current_exe().map_err(|e| Failure::failed(format!("finding this program: {e}")))?;
        let lab = find(variable("TOMBOLO_LAB").map(PathBuf::from), &program)?;
        let python = interpreter(candidates(std::env::var_os("PATH").as_deref()))?;
        if self.arguments.first().is_some_and(|word| word == "run") && !python.missing.is_empty() {
            out::tell!("tombolo lab: it measures, but reports need more: {}", apt_line(&python.missing));
        }
        let mut command = Command::new(&python.path);
        command.args(["-m", "tombolo_lab"]).args(&self.arguments).env("PYTHONPATH", python_path(&lab));
        if variable("TOMBOLO_PROGRAM").is_none() {
            // What the lab measures is this program, not another one in PATH.
            command.env("TOMBOLO_PROGRAM", &program);
        }
        let error = command.exec();
        Err(Failure::failed(format!("running {}: {error}", python.path.display())))
    }
}

/// The folder that holds the package.
fn find(named: Option<PathBuf>, program: &Path) -> Result<PathBuf, Failure> {
    if let Some(folder) = named {
        return match folder.join(MARK).is_file() {
            true => Ok(folder),
            false => Err(Failure::misused(format!(
                "$TOMBOLO_LAB: expected the folder `lab` of a checkout, found no {MARK} in {}",
                folder.display()
            ))),
        };
    }
    let folders = places(program);
    let found = folders.iter().find(|folder| folder.join(MARK).is_file());
    found.cloned().ok_or_else(|| {
        let tried: Vec<_> = folders.iter().map(|folder| folder.display().to_string()).collect();
        Failure::failed(format!(
            "the lab is not installed: looked at {}; set $TOMBOLO_LAB to the folder `lab` of a checkout",
            tried.join(", ")
        ))
    })
}

/// Where the lab of a program may be: in its checkout, and beside it where it is installed.
fn places(program: &Path) -> Vec<PathBuf> {
    let target = program.ancestors().find(|folder| folder.file_name() == Some(OsStr::new("target")));
    let checkout = target.and_then(Path::parent).map(|folder| folder.join("lab"));
    let installed = program.parent().and_then(Path::parent).map(|folder| folder.join("share/tombolo/lab"));
    checkout.into_iter().chain(installed).collect()
}

/// The lab before what PYTHONPATH holds already.
fn python_path(lab: &Path) -> OsString {
    let mut value = lab.as_os_str().to_os_string();
    if let Some(more) = variable("PYTHONPATH") {
        value.push(":");
        value.push(more);
    }
    value
}

/// An interpreter, and the libraries of the lab that it does not have.
#[derive(Debug, PartialEq, Eq)]
struct Python {
    path: PathBuf,
    missing: Vec<String>,
}

/// The interpreters that are there, the one of PATH first.
fn candidates(path: Option<&OsStr>) -> Vec<PathBuf> {
    let in_path = path.map(std::env::split_paths).into_iter().flatten().map(|folder| folder.join("python3"));
    let first = in_path.into_iter().find(|file| file.is_file());
    let debian = PathBuf::from(DEBIAN_PYTHON);
    first.into_iter().chain(debian.is_file().then_some(debian)).collect()
}

/// The first one that has all libraries; if there is none, the one that lacks the fewest.
fn interpreter(candidates: Vec<PathBuf>) -> Result<Python, Failure> {
    let mut best: Option<Python> = None;
    for path in &candidates {
        let Some(missing) = probe(path) else { continue };
        // The last one among equals: Debian's packages are for Debian's interpreter.
        if best.as_ref().is_none_or(|best| missing.len() <= best.missing.len()) {
            best = Some(Python { path: path.clone(), missing });
        }
        if best.as_ref().is_some_and(|best| best.missing.is_empty()) {
            break;
        }
    }
    best.ok_or_else(|| {
        let tried: Vec<_> = candidates.iter().map(|path| path.display().to_string()).collect();
        let found = if tried.is_empty() { "none".into() } else { format!("only {}", tried.join(", ")) };
        Failure::failed(format!(
            "the lab expects python3 of version 3.11 or later, found {found}: apt-get install python3"
        ))
    })
}

/// The libraries that an interpreter lacks; None where it is too old or cannot be run.
fn probe(python: &Path) -> Option<Vec<String>> {
    let mut command = Command::new(python);
    command.args(["-c", PROBE]).args(LIBRARIES).stdin(Stdio::null()).stderr(Stdio::null());
    let done = command.output().ok().filter(|done| done.status.success())?;
    Some(String::from_utf8_lossy(&done.stdout).split_whitespace().map(String::from).collect())
}

fn apt_line(missing: &[String]) -> String {
    let packages: Vec<_> = missing.iter().map(|name| format!("python3-{name}")).collect();
    format!("apt-get install {}", packages.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::os::unix::fs::PermissionsExt;

    fn text(result: Result<impl std::fmt::Debug, Failure>) -> String {
        match result {
            Err(Failure::Said(_, text)) => text,
            other => panic!("expected a failure: {other:?}"),
        }
    }

    /// A file that can be run, as an interpreter that answers so.
    fn script(folder: &Path, name: &str, body: &str) -> PathBuf {
        let path = folder.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn what_stands_behind_lab_goes_through() {
        for line in ["--help", "run x --set a=b,c --quick", "run --file -f x", "compare -- -a -b", "-V", ""] {
            let words: Vec<_> = line.split_whitespace().collect();
            let cli = crate::parse(["tombolo", "lab"].iter().chain(&words).map(OsString::from)).unwrap();
            let crate::Command::Lab(lab) = cli.command else { panic!("{line}") };
            assert_eq!(lab.arguments, words, "{line}");
        }
        let cli = crate::Cli::try_parse_from(["tombolo", "--fabric", "x", "lab", "run", "y", "--quick"]).unwrap();
        let crate::Command::Lab(lab) = cli.command else { panic!() };
        assert_eq!(lab.arguments, ["run", "y", "--quick"]);
    }

    #[test]
    fn the_lab_is_in_the_checkout_or_beside_the_program() {
        let home = tempfile::tempdir().unwrap();
        let make = |folder: &str| {
            let folder = home.path().join(folder);
            std::fs::create_dir_all(folder.join("tombolo_lab")).unwrap();
            std::fs::write(folder.join(MARK), "").unwrap();
            folder
        };
        let program = home.path().join("tree/target/release/tombolo");
        let missing = text(find(None, &program));
        let tried = home.path().join("tree/lab").display().to_string();
        assert!(missing.contains(&tried) && missing.contains("set $TOMBOLO_LAB"), "{missing}");
        let tree = make("tree/lab");
        for program in ["tree/target/release/tombolo", "tree/target/x86_64-unknown-linux-gnu/debug/tombolo"] {
            assert_eq!(find(None, &home.path().join(program)).unwrap(), tree);
        }
        let installed = make("usr/share/tombolo/lab");
        assert_eq!(find(None, &home.path().join("usr/bin/tombolo")).unwrap(), installed);
        assert_eq!(find(Some(tree.clone()), &home.path().join("usr/bin/tombolo")).unwrap(), tree);
        let wrong = text(find(Some(home.path().into()), &program));
        assert!(wrong.starts_with("$TOMBOLO_LAB: expected the folder `lab`"), "{wrong}");
    }

    #[test]
    fn the_interpreter_is_the_one_that_has_the_libraries() {
        let home = tempfile::tempdir().unwrap();
        let old = script(home.path(), "old", "exit 3");
        let bare = script(home.path(), "bare", "echo pandas scipy");
        let other = script(home.path(), "other", "echo numpy scipy");
        let full = script(home.path(), "full", "echo");
        let chosen = |paths: &[&PathBuf]| interpreter(paths.iter().map(|p| (*p).clone()).collect());
        assert_eq!(chosen(&[&old, &bare, &full]).unwrap(), Python { path: full.clone(), missing: vec![] });
        assert_eq!(chosen(&[&full, &bare]).unwrap().path, full);
        let poor = chosen(&[&bare, &other, &old]).unwrap();
        assert_eq!(poor.path, other);
        assert_eq!(apt_line(&poor.missing), "apt-get install python3-numpy python3-scipy");
        let none = text(chosen(&[&old, &home.path().join("none")]));
        assert!(none.contains("3.11 or later, found only") && none.ends_with("apt-get install python3"), "{none}");
        assert!(text(chosen(&[])).contains("found none"));
    }

    #[test]
    fn an_interpreter_of_this_machine_is_probed() {
        let Some(python) = candidates(std::env::var_os("PATH").as_deref()).pop() else {
            return tombolo_testing::skip("Python is not installed");
        };
        // A library that every Python has is never missing.
        let missing = probe(&python).unwrap_or_default();
        assert!(missing.iter().all(|name| LIBRARIES.contains(&name.as_str())), "{missing:?}");
    }
}
