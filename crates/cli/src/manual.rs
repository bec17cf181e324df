//! `tombolo version`, `completions` and `man`: what the one definition of the flags also gives.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;
use serde::Serialize;
use tombolo_host::api::report::SCHEMA;

use crate::complete;
use crate::exit::{Exit, Failure};
use crate::out;

#[derive(Args, Debug)]
pub(crate) struct Version {
    /// Print the version as JSON, with the version of the reports' schema
    #[arg(long)]
    json: bool,
}

impl Version {
    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        #[derive(Serialize)]
        struct Report {
            schema: u32,
            version: &'static str,
        }
        let version = env!("CARGO_PKG_VERSION");
        if self.json {
            out::json(&Report { schema: SCHEMA, version })?;
        } else {
            out::print(&format!("tombolo {version}\n"))?;
        }
        Ok(Exit::Done)
    }
}

#[derive(Args, Debug)]
pub(crate) struct Completions {
    /// Shell to complete for
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        let text = complete::script(&self.shell.to_string()).map_err(|e| Failure::failed(e.to_string()))?;
        out::print(&text)?;
        Ok(Exit::Done)
    }
}

const EXAMPLES_OF_PAGES: &str = "\
Examples:
  tombolo man | man -l -                    the program
  tombolo man tombolo.toml | man -l -       the fabric file
  tombolo man --out ~/.local/share/man/man1";

#[derive(Args, Debug)]
#[command(after_help = EXAMPLES_OF_PAGES)]
pub(crate) struct Man {
    /// Page to print, such as tombolo-up or tombolo.toml [default: tombolo]
    #[arg(value_name = "PAGE", conflicts_with = "out")]
    page: Option<String>,
    /// Folder for the pages of all commands (tombolo.1, tombolo-up.1, …) and of the fabric file
    /// (tombolo.toml.5); created if it does not exist
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Man {
    pub(crate) fn run(&self) -> Result<Exit, Failure> {
        let mut command = crate::command();
        command.build();
        let mut pages = vec![("tombolo.toml.5".to_string(), of_the_file().into_bytes())];
        add_pages(&command, "tombolo", &mut pages)?;
        match &self.out {
            None => {
                let wanted = self.page.as_deref().unwrap_or("tombolo");
                let named = |file: &str| file.rsplit_once('.').is_some_and(|(name, _)| name == wanted);
                let Some((_, text)) = pages.iter().find(|(file, _)| named(file)) else {
                    let names: Vec<_> = pages.iter().filter_map(|(f, _)| Some(f.rsplit_once('.')?.0)).collect();
                    return Err(Failure::misused(format!("no page {wanted:?}; there are {}", names.join(", "))));
                };
                out::print(&String::from_utf8_lossy(text))?;
            }
            Some(folder) => {
                let at = |e| Failure::failed(format!("writing manual pages into {}: {e}", folder.display()));
                std::fs::create_dir_all(folder).map_err(at)?;
                for (file, text) in pages {
                    std::fs::write(folder.join(file), text).map_err(at)?;
                }
            }
        }
        Ok(Exit::Done)
    }
}

fn page(command: &clap::Command, name: &str) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    let version = env!("CARGO_PKG_VERSION");
    clap_mangen::Man::new(command.clone().display_name(name.to_string()))
        .title(name)
        .source(format!("tombolo {version}"))
        .manual("Tombolo")
        .render(&mut text)?;
    Ok(text)
}

/// The pages of a command and of those below it, by their files' names.
fn add_pages(command: &clap::Command, name: &str, out: &mut Vec<(String, Vec<u8>)>) -> std::io::Result<()> {
    out.push((format!("{name}.1"), page(command, name)?));
    for sub in command.get_subcommands().filter(|s| s.get_name() != "help" && !s.is_hide_set()) {
        add_pages(sub, &format!("{name}-{}", sub.get_name()), out)?;
    }
    Ok(())
}

/// tombolo.toml(5): docs/fabric-file.md, whose tables are tested to be those of the parser.
fn of_the_file() -> String {
    let text = include_str!("../../../docs/fabric-file.md");
    let see = ["tombolo(1)", "tombolo-up(1)", "tombolo-check(1)", "tombolo-apply(1)", "tombolo-schema(1)"];
    crate::page::manual(text, "tombolo.toml", 5, "the file that describes a fabric of Tombolo", &see)
}

/// docs/cli.md: the help of every command.
#[cfg(test)]
pub(crate) fn reference() -> String {
    fn add(command: &mut clap::Command, out: &mut String) {
        let name = command.get_bin_name().unwrap_or("tombolo").to_string();
        let help = command.clone().term_width(100).render_long_help().to_string();
        let lines: Vec<_> = help.lines().map(str::trim_end).collect();
        out.push_str(&format!("\n## `{name}`\n\n```text\n{}\n```\n", lines.join("\n").trim_end()));
        for sub in command.get_subcommands_mut().filter(|s| s.get_name() != "help" && !s.is_hide_set()) {
            add(sub, out);
        }
    }
    let mut out = String::from(HEAD);
    let mut command = crate::command();
    command.build();
    add(&mut command, &mut out);
    out
}

#[cfg(test)]
const HEAD: &str = "\
# The program `tombolo`

All commands and options, as the program itself prints them. A test compares it with the code; `UPDATE=1 cargo test -p tombolo-cli reference`
writes it again.

- **Exit codes**: 0 done, 1 failed, 2 used wrongly (this includes a faulty fabric file), 3 done in part. A closed pipe is
  not an error.
- **JSON**: every command that reports accepts `--json`, and prints the schema of [the API](api.md).
- **Output**: tables are for people and may change; `--json` only gains fields. There is no colour in a pipe or with
  `NO_COLOR`. Progress is shown on a terminal only.
- **Completion**: `source <(tombolo completions bash)`; also zsh, fish, elvish, powershell. Names of fabrics, networks,
  machines, ports, links and services are completed too, and what `forward`, `rule`, `set` and `unset` take: those of the
  running fabric, else those of its file.
- **Manual pages**: `tombolo man | man -l -` shows one. `tombolo man --out DIR` writes all of them.
- **Signals**: SIGINT, SIGTERM and SIGHUP to `up` stop the fabric as `down` does; SIGUSR2, and with `--leave-on-term` SIGTERM,
  leave machines and containers running for the next daemon ([upgrade.md](upgrade.md)). A second signal kills machines that end
  slowly. The daemon's log is `log` in the runtime directory. `down` keeps leases and logs in the state folder.
- **After a crash**: the next `up` keeps the machines that still fit the file. It ends, restarts or removes the rest, and
  prints a line with the reason for each; `status --json` has the same lines as `takeover`. `down` ends all that is left.
  Both wait for a daemon that is just ending, and say so (the kernel needs 22 s for 256 taps).
- **Deleted files**: a running daemon creates deleted runtime files again. The socket of a port whose peer is connected
  comes back when the peer disconnects, a console when its machine is restarted. `status`, `up` and `down` find a
  daemon by the lock that it holds. If the daemon does not answer, `down` ends it by a signal.
- **Full disk**: `up` needs no disk space to restore the network of guests that still run. What could not be written is a
  warning. Without the owner record the next start may restart machines; without leases addresses may change.
- **Consoles**: `cell console` connects to the console; on a terminal Ctrl-] leaves it. Input from a pipe is typed, and the
  output is followed until the machine ends. `NAME.console` in the runtime directory has its last 512 KiB to 1 MiB.
";

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use clap::{Parser, ValueEnum};

    use crate::Cli;

    #[test]
    fn flags() {
        let parse = |line: &str| Cli::try_parse_from(line.split(' '));
        assert!(parse("tombolo version --json").is_ok() && parse("tombolo man --out x").is_ok());
        assert!(parse("tombolo completions bash").is_ok() && parse("tombolo completions cobol").is_err());
    }

    #[test]
    fn every_shell_has_a_script_and_every_command_a_page() {
        for shell in Shell::value_variants() {
            let text = complete::script(&shell.to_string()).unwrap();
            // As the system finds it, and not where this build lies.
            assert!(text.contains("tombolo") && !text.contains("target"), "{text}");
        }
        let dir = tempfile::tempdir().unwrap();
        Man { page: None, out: Some(dir.path().into()) }.run().unwrap();
        for page in ["tombolo.1", "tombolo-up.1", "tombolo-cell-run.1"] {
            let text = std::fs::read_to_string(dir.path().join(page)).unwrap();
            assert!(text.contains(".SH NAME"), "{page}");
        }
        // Every key of every section is a term of the page of the file.
        let file = std::fs::read_to_string(dir.path().join("tombolo.toml.5")).unwrap();
        for section in tombolo_host::file::schema::SECTIONS {
            let (_, rest) = file
                .split_once(&format!(".SS \\fB{}\\fR\n", section.form))
                .unwrap_or_else(|| panic!("{}", section.form));
            let part = rest.split("\n.SS ").next().unwrap_or_default();
            for key in section.keys() {
                assert!(part.contains(&format!(".TP\n\\fB{}\\fR\n", key.name)), "{}: {}", section.form, key.name);
            }
        }
        let main = std::fs::read_to_string(dir.path().join("tombolo.1")).unwrap();
        assert!(main.contains("Exit codes: 0 done, 1 failed, 2 used wrongly, 3 done in part"));
    }

    #[test]
    fn the_help_tells_every_variable_that_is_read() {
        fn look(folder: &Path, out: &mut std::collections::BTreeSet<String>) {
            for entry in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
                if entry.is_dir() {
                    look(&entry, out);
                } else if let Ok(text) = std::fs::read_to_string(&entry) {
                    let upper = |c: char| c.is_ascii_uppercase() || c == '_';
                    let rest = text.split("\"TOMBOLO_").skip(1).filter_map(|t| t.split_once('"'));
                    out.extend(rest.map(|(name, _)| name.to_string()).filter(|n| n.chars().all(upper)));
                }
            }
        }
        let mut names = std::collections::BTreeSet::new();
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        ["cli/src", "host/src"].iter().for_each(|folder| look(&crates.join(folder), &mut names));
        assert!(names.len() >= 5, "{names:?}");
        let help = crate::command().render_long_help().to_string();
        for name in names {
            assert!(help.contains(&format!("\n  TOMBOLO_{name}")), "$TOMBOLO_{name} is not in the help");
        }
    }

    #[test]
    fn the_reference_is_what_the_program_says() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli.md");
        if std::env::var_os("UPDATE").is_some() {
            std::fs::write(&path, reference()).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap();
        assert!(written == reference(), "docs/cli.md is old: UPDATE=1 cargo test -p tombolo-cli reference");
    }
}
