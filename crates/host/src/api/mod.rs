//! The API of a running fabric: HTTP with JSON on a Unix socket in its runtime directory.
//!
//! - `model`: the documents.
//! - `server`: the routes; who may ask is decided by the peer's credentials.
//! - `client`: how the command line asks.
//!
//! docs/api.md describes it for people, `openapi.json` for programs; a test holds both to the routes.

pub mod client;
pub mod model;
pub mod server;

/// The OpenAPI document, as served at /v1/openapi.json.
pub const OPENAPI: &str = include_str!("openapi.json");
