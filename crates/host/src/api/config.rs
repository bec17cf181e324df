//! `/v1/config`: the configuration that runs, and changes of it.

use std::collections::BTreeMap;
use std::path::PathBuf;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Request;
use super::query::{Asked, Keys};
use super::server::{Answer, App, ask};
use super::span::Body;

/// The configuration that a fabric runs with.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ConfigReport {
    /// Version of this document.
    pub schema: u32,
    /// The fabric's name.
    pub fabric: String,
    /// The fabric file: relative paths start from its folder.
    pub file: PathBuf,
    /// Differs from that of every other configuration; a change may name it.
    pub revision: String,
    /// The file as it would be to say what runs: an object of its sections, with members that were
    /// added.
    pub config: Value,
    /// The same as TOML.
    pub toml: String,
    /// The rate limits that ports were given while they ran, by port, in words: "send 20M, receive
    /// 1G", or "off". They hold in place of the configuration's.
    #[serde(default)]
    pub port_limits: BTreeMap<String, String>,
    /// What commands and requests have changed since the file was read, as a merge patch of its
    /// content.
    pub changes: Value,
}

/// What the address of a change may say.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConfigQuery {
    /// Only tell what would be done.
    #[serde(default)]
    pub dry_run: bool,
    /// Refuse the change if this is not the revision of what runs.
    pub revision: Option<String>,
}

impl Keys for ConfigQuery {
    const KEYS: &'static [(&'static str, &'static str)] =
        &[("dry_run", "true or false"), ("revision", "the revision that GET /v1/config gave")];
}

/// `GET /v1/config`: TOML alone for those who accept nothing else.
pub(super) async fn get(State(app): State<App>, headers: HeaderMap) -> Result<Response, Answer> {
    let report = ask(&app.requests, Request::Config).await?;
    let accepted = headers.get(header::ACCEPT).and_then(|v| v.to_str().ok()).unwrap_or_default();
    if accepted.trim().eq_ignore_ascii_case("application/toml") {
        return Ok(([(header::CONTENT_TYPE, "application/toml")], report.toml).into_response());
    }
    Ok(Json(report).into_response())
}

/// `PATCH /v1/config`
pub(super) async fn patch(
    State(app): State<App>,
    Asked(query): Asked<ConfigQuery>,
    Body(patch): Body<Value>,
) -> Result<Response, Answer> {
    Ok(Json(ask(&app.requests, |reply| Request::ChangeConfig { patch, query, reply }).await?).into_response())
}
