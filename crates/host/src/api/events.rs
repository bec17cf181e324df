//! `GET /v1/events`: what happened, asked for once, waited for, or followed.
//!
//! Nothing is held for a client: it asks for what follows a number, and the log says how many it
//! has missed. So a follower that reads slowly costs the daemon the two pieces that are on their
//! way to it, and loses events with a count instead of delaying any.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use tokio::sync::mpsc;

use super::Request;
use super::connections::OpenConnection;
use super::query::{Asked, Keys, wrong};
use super::server::{Answer, App, ask, endless, stream_permit};
use crate::fabric::events::Events;

/// The longest that an answer is waited for.
const MAX_WAIT_S: f64 = 60.0;
/// Events of one answer, unless fewer are asked for.
const MAX_EVENTS: usize = 1000;
/// Events of one piece of a followed answer.
const PIECE: usize = 64;
/// A silent follower hears a blank line or comment so often, so that both ends learn of the other's
/// death.
const ALIVE: Duration = Duration::from_secs(15);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EventsQuery {
    /// The number of the last event that is known already.
    after: Option<u64>,
    /// Seconds to wait for an event that follows it.
    wait: Option<f64>,
    limit: Option<usize>,
    follow: Option<u8>,
}

impl Keys for EventsQuery {
    const KEYS: &'static [(&'static str, &'static str)] = &[
        ("after", "the number of an event"),
        ("wait", "0 to 60 seconds"),
        ("limit", "a number of events, at least 1"),
        ("follow", "0 or 1"),
    ];
}

/// The two forms of an answer that goes on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    /// One event per line.
    Lines,
    /// Server-sent events, for a browser's `EventSource`.
    Sent,
}

pub(super) async fn events(
    State(app): State<App>,
    Extension(slot): Extension<Arc<OpenConnection>>,
    headers: HeaderMap,
    Asked(query): Asked<EventsQuery>,
) -> Result<Response, Answer> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("");
    let wants_sent = text(header::ACCEPT.as_str()).contains("text/event-stream");
    let wait = query.wait.unwrap_or(0.0);
    if !(0.0..=MAX_WAIT_S).contains(&wait) {
        return Err(wrong("wait", format!("0 to {MAX_WAIT_S} seconds"), wait.to_string()));
    }
    if query.limit == Some(0) {
        return Err(wrong("limit", "at least 1", "0"));
    }
    let log = ask(&app.requests, Request::Events).await?;
    if wants_sent || query.follow.unwrap_or(0) != 0 {
        // A browser that connects again says what it had.
        let after = text("last-event-id").parse().ok().or(query.after);
        let (form, kind) = match wants_sent {
            true => (Form::Sent, "text/event-stream"),
            false => (Form::Lines, "application/x-ndjson"),
        };
        let permit = stream_permit(&app, &slot)?;
        let (sender, pieces) = mpsc::channel(1);
        tokio::spawn(follow(log, after, form, sender));
        return Ok(endless(kind, pieces, permit));
    }
    let limit = query.limit.unwrap_or(MAX_EVENTS).min(MAX_EVENTS);
    if let Some(after) = query.after.filter(|after| wait > 0.0 && log.after(Some(*after), 1).events.is_empty()) {
        let _permit = stream_permit(&app, &slot)?;
        // It keeps no other request of its process waiting.
        slot.is_endless();
        // Nothing came: the answer is empty.
        let _ = tokio::time::timeout(Duration::from_secs_f64(wait), log.wait_after(after)).await;
    }
    Ok(Json(log.after(query.after, limit)).into_response())
}

/// Sends what follows number `after`, until the client goes.
async fn follow(log: Events, after: Option<u64>, form: Form, sender: mpsc::Sender<Vec<u8>>) {
    let mut after = after;
    loop {
        let answer = log.after(after, PIECE);
        let mut piece = String::new();
        if answer.lost > 0 {
            let gap = format!("{{\"lost\":{}}}", answer.lost);
            piece.push_str(&match form {
                Form::Lines => format!("{gap}\n"),
                Form::Sent => format!("event: lost\ndata: {gap}\n\n"),
            });
        }
        for event in &answer.events {
            // A report has only text and numbers.
            let text = serde_json::to_string(event).unwrap_or_default();
            piece.push_str(&match form {
                Form::Lines => format!("{text}\n"),
                Form::Sent => format!("id: {}\ndata: {text}\n\n", event.id),
            });
        }
        let known = answer.events.last().map_or(answer.last, |event| event.id);
        after = Some(known);
        if piece.is_empty() {
            let waited = tokio::select! {
                () = sender.closed() => return,
                waited = tokio::time::timeout(ALIVE, log.wait_after(known)) => waited,
            };
            if waited.is_ok() {
                continue;
            }
            piece.push_str(if form == Form::Lines { "\n" } else { ":\n\n" });
        }
        if sender.send(piece.into_bytes()).await.is_err() {
            return;
        }
    }
}
