//! The requests of a control plane for networks across machines: see [`crate::fabric`]'s `span` for
//! what becomes of them.

use axum::Json;
use axum::extract::{DefaultBodyLimit, FromRequest, Path as InPath, Request as HttpRequest, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use serde::de::DeserializeOwned;

use super::Request;
use super::report::{LostAnswer, LostRequest, RemoteConflicts, RemotesReport, RemotesRequest, Span, SpanReport};
use super::server::{Answer, App, ask, whole_body};

/// Bytes of what one machine has in a network: 4,096 members, each with a long name and 16 long
/// addresses.
pub(super) const MAX_REMOTES_BYTES: usize = 4 << 20;

/// The way with room for what one machine has in a network.
pub(super) fn long(way: MethodRouter<App>) -> MethodRouter<App> {
    way.layer(DefaultBodyLimit::max(MAX_REMOTES_BYTES))
}

/// A body of JSON, whatever its Content-Type says.
pub(super) struct Body<T>(pub(super) T);

impl<T: DeserializeOwned> FromRequest<App> for Body<T> {
    type Rejection = Response;

    async fn from_request(request: HttpRequest, app: &App) -> Result<Self, Response> {
        let bytes = whole_body(request, app).await?;
        let wrong = |error| {
            let error = format!("the body: expected JSON as openapi.json describes it, found: {error}");
            Answer::new(StatusCode::BAD_REQUEST, error).into_response()
        };
        serde_json::from_slice(&bytes).map(Body).map_err(wrong)
    }
}

pub(super) async fn put_remotes(
    State(app): State<App>,
    InPath((network, machine)): InPath<(String, String)>,
    Body(body): Body<RemotesRequest>,
) -> Result<Json<RemoteConflicts>, Answer> {
    Ok(Json(ask(&app.requests, |reply| Request::PutRemotes { network, machine, body, reply }).await?))
}

pub(super) async fn delete_remotes(
    State(app): State<App>,
    InPath((network, machine)): InPath<(String, String)>,
) -> Result<StatusCode, Answer> {
    ask(&app.requests, |reply| Request::DeleteRemotes { network, machine, reply }).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn remotes(
    State(app): State<App>,
    InPath(network): InPath<String>,
) -> Result<Json<RemotesReport>, Answer> {
    Ok(Json(ask(&app.requests, |reply| Request::Remotes { network, reply }).await?))
}

pub(super) async fn put_lost(
    State(app): State<App>,
    InPath(network): InPath<String>,
    Body(body): Body<LostRequest>,
) -> Result<Json<LostAnswer>, Answer> {
    Ok(Json(ask(&app.requests, |reply| Request::PutLost { network, body, reply }).await?))
}

pub(super) async fn put_report(
    State(app): State<App>,
    Body(report): Body<Box<SpanReport>>,
) -> Result<StatusCode, Answer> {
    ask(&app.requests, |reply| Request::PutSpan { report, reply }).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn report(State(app): State<App>) -> Result<Json<Span>, Answer> {
    let none = || {
        let answer = Answer::new(StatusCode::NOT_FOUND, "no report of tombolo-span has come");
        answer.hint(
            "start it beside the fabric by its unit tombolo-span@NAME, or `tombolo-span --config FILE` (docs/span.md)",
        )
    };
    ask(&app.requests, Request::Span).await?.map(Json).ok_or_else(none)
}
