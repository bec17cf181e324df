//! `POST /v1/apply`: changes the running fabric to what a fabric file says, or tells what that
//! would do.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::query::Keys;

/// What was done, or would be, to make the running fabric what the file says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ApplyReport {
    /// Version of this document.
    pub schema: u32,
    /// The fabric's name.
    pub fabric: String,
    /// "planned": nothing was asked to be done; "done": all of it; "partly": some steps failed;
    /// "refused": nothing was done.
    pub outcome: String,
    /// What differs, by section.
    pub changes: Vec<ChangeReport>,
    /// Sections that are as in the file; nothing touched them.
    pub unchanged: usize,
    /// Members that were added while the fabric ran and that the file does not have: they stay.
    pub kept: Vec<String>,
    /// Keys that were changed by a command or request while the fabric ran, and that are as in the
    /// file from now on.
    #[serde(default)]
    pub reverted: Vec<String>,
}

/// One section that differs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChangeReport {
    /// Like "cell.web".
    pub section: String,
    /// "add", "remove", "change", "restart" or "refuse".
    pub action: String,
    /// Keys whose values differ.
    pub keys: Vec<KeyReport>,
    /// Why it is restarted or refused, and what comes with a change; empty where nothing is to be
    /// said.
    pub reason: String,
    /// "planned", "done", "failed" or "refused".
    pub outcome: String,
    /// Why it failed.
    pub error: Option<String>,
}

/// A key whose value differs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeyReport {
    /// As in the file; "forward PROTO ADDRESS" for a forward of a network.
    pub key: String,
    /// Its value in what runs; null where there is none.
    pub before: Option<String>,
    /// Its value in the file; null where there is none.
    pub after: Option<String>,
}

impl Keys for ApplyQuery {
    const KEYS: &'static [(&'static str, &'static str)] = &[("dry_run", "true or false"), ("file", "an absolute path")];
}

/// What the address of the request may say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApplyQuery {
    /// Only tell what would be done.
    #[serde(default)]
    pub dry_run: bool,
    /// Where the text is from: relative paths in it start from its folder, and the next `up` may be
    /// given it. The file that the fabric was started from if left out.
    pub file: Option<PathBuf>,
}
