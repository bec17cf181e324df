//! The routes of the API.
//!
//! The socket is 0600 in a directory that is 0700, and each request's peer must be root or the daemon's own user
//! (`SO_PEERCRED`), so that a socket that was passed on or moved grants nothing.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::connect_info::{ConnectInfo, Connected};
use axum::extract::{Path, Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::IncomingStream;
use axum::{Json, Router};
use tokio::net::UnixListener;

use super::OPENAPI;
use super::model::{Add, Refusal, SCHEMA, Version};
use crate::fabric::{FabricError, Shared, machine_stop, metrics};

/// Every route: method, path. The OpenAPI document has exactly these.
pub const ROUTES: &[(&str, &str)] = &[
    ("get", "/v1/version"),
    ("get", "/v1/openapi.json"),
    ("get", "/v1/status"),
    ("get", "/v1/ports"),
    ("get", "/v1/ports/{name}"),
    ("delete", "/v1/ports/{name}"),
    ("get", "/v1/ports/{name}/capture"),
    ("get", "/v1/machines"),
    ("post", "/v1/machines/{name}/run"),
    ("post", "/v1/machines/{name}/stop"),
    ("get", "/v1/machines/{name}/console"),
    ("post", "/v1/members"),
    ("post", "/v1/down"),
    ("get", "/metrics"),
];

/// Who is at the other end of a connection.
#[derive(Debug, Clone, Copy)]
struct Peer {
    /// `None` if the kernel did not say.
    uid: Option<u32>,
}

impl Connected<IncomingStream<'_, UnixListener>> for Peer {
    fn connect_info(stream: IncomingStream<'_, UnixListener>) -> Self {
        Peer { uid: stream.io().peer_cred().ok().map(|c| c.uid()) }
    }
}

/// An answer that is not 2xx.
struct Refused(StatusCode, String);

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (self.0, Json(Refusal { error: self.1 })).into_response()
    }
}

impl From<FabricError> for Refused {
    fn from(error: FabricError) -> Self {
        let status = match &error {
            FabricError::Unknown { .. } => StatusCode::NOT_FOUND,
            FabricError::File(_) | FabricError::Plan(_) => StatusCode::UNPROCESSABLE_ENTITY,
            FabricError::State(_) => StatusCode::CONFLICT,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Refused(status, error.to_string())
    }
}

async fn check_peer(ConnectInfo(peer): ConnectInfo<Peer>, request: Request, next: Next) -> Response {
    let me = rustix::process::geteuid().as_raw();
    match peer.uid {
        Some(uid) if uid == me || uid == 0 => next.run(request).await,
        who => {
            let who = who.map_or("an unknown user".into(), |u| format!("user {u}"));
            let text = format!("this fabric belongs to user {me}, and {who} asked; ask as that user or as root");
            Refused(StatusCode::FORBIDDEN, text).into_response()
        }
    }
}

async fn version() -> Json<Version> {
    Json(Version { program: "tombolo".into(), version: crate::fabric::VERSION.into(), schema: SCHEMA })
}

async fn openapi() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "application/json")], OPENAPI)
}

async fn status(State(shared): State<Shared>) -> Result<Response, Refused> {
    Ok(Json(shared.running.lock().await.status()?).into_response())
}

async fn ports(State(shared): State<Shared>) -> Result<Response, Refused> {
    Ok(Json(shared.running.lock().await.status()?.ports).into_response())
}

async fn port(State(shared): State<Shared>, Path(name): Path<String>) -> Result<Response, Refused> {
    let mut running = shared.running.lock().await;
    let port = running.status()?.ports.into_iter().find(|p| p.name == name);
    Ok(Json(port.ok_or_else(|| running.unknown("port", &name))?).into_response())
}

async fn delete_port(State(shared): State<Shared>, Path(name): Path<String>) -> Result<StatusCode, Refused> {
    shared.running.lock().await.remove(&name)?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(serde::Deserialize)]
struct CaptureQuery {
    snap: Option<u32>,
}

async fn capture(
    State(shared): State<Shared>,
    Path(name): Path<String>,
    Query(query): Query<CaptureQuery>,
) -> Result<Response, Refused> {
    let stream = shared.running.lock().await.capture(&name, query.snap)?;
    Ok(([(header::CONTENT_TYPE, "application/x-pcapng")], Body::from_stream(stream)).into_response())
}

async fn machines(State(shared): State<Shared>) -> Response {
    Json(shared.running.lock().await.machines()).into_response()
}

async fn run(State(shared): State<Shared>, Path(name): Path<String>) -> Result<StatusCode, Refused> {
    shared.running.lock().await.run(&name)?;
    Ok(StatusCode::NO_CONTENT)
}

async fn stop(State(shared): State<Shared>, Path(name): Path<String>) -> Result<StatusCode, Refused> {
    machine_stop(&shared, &name).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(serde::Deserialize)]
struct ConsoleQuery {
    /// Offset from which to read; without it the whole.
    from: Option<u64>,
}

/// The console from an offset, and in `X-Console-Next` the offset to go on from.
async fn console(
    State(shared): State<Shared>,
    Path(name): Path<String>,
    Query(query): Query<ConsoleQuery>,
) -> Result<Response, Refused> {
    let (bytes, next) = shared.running.lock().await.console(&name, query.from)?;
    let headers = [(header::CONTENT_TYPE, "application/octet-stream".to_string())];
    Ok((headers, [("x-console-next", next.to_string())], bytes).into_response())
}

async fn add(State(shared): State<Shared>, body: Bytes) -> Result<StatusCode, Refused> {
    let bad = |text: String| Refused(StatusCode::BAD_REQUEST, text);
    let add: Add = serde_json::from_slice(&body).map_err(|e| bad(format!("the request's body: {e}")))?;
    let text = add.to_toml().map_err(bad)?;
    shared.running.lock().await.add(&add.name, &text)?;
    Ok(StatusCode::CREATED)
}

async fn down(State(shared): State<Shared>) -> StatusCode {
    shared.end.notify_one();
    StatusCode::ACCEPTED
}

async fn prometheus(State(shared): State<Shared>) -> Result<Response, Refused> {
    let text = metrics(&shared.running.lock().await.status()?);
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response())
}

async fn nothing_here(request: Request) -> Refused {
    let text = format!("there is nothing at {}; GET /v1/openapi.json describes what there is", request.uri().path());
    Refused(StatusCode::NOT_FOUND, text)
}

/// The routes.
pub fn router(shared: Shared) -> Router {
    Router::new()
        .route("/v1/version", get(version))
        .route("/v1/openapi.json", get(openapi))
        .route("/v1/status", get(status))
        .route("/v1/ports", get(ports))
        .route("/v1/ports/{name}", get(port).delete(delete_port))
        .route("/v1/ports/{name}/capture", get(capture))
        .route("/v1/machines", get(machines))
        .route("/v1/machines/{name}/run", post(run))
        .route("/v1/machines/{name}/stop", post(stop))
        .route("/v1/machines/{name}/console", get(console))
        .route("/v1/members", post(add))
        .route("/v1/down", post(down))
        .route("/metrics", get(prometheus))
        .fallback(nothing_here)
        .layer(axum::middleware::from_fn(check_peer))
        .with_state(shared)
}

/// Listens at `path`, in place of a socket that a killed daemon left.
///
/// # Errors
/// The system's answer.
pub fn listen(path: &std::path::Path) -> std::io::Result<UnixListener> {
    use std::os::unix::fs::PermissionsExt;
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves until the fabric's end is rung and its answers are out.
///
/// # Errors
/// The listener's.
pub async fn serve(listener: UnixListener, shared: Shared, until: Arc<tokio::sync::Notify>) -> std::io::Result<()> {
    let app = router(shared).into_make_service_with_connect_info::<Peer>();
    axum::serve(listener, app).with_graceful_shutdown(async move { until.notified().await }).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::model;

    fn document() -> serde_json::Value {
        serde_json::from_str(OPENAPI).unwrap()
    }

    #[test]
    fn the_document_has_exactly_the_routes() {
        let mut described = Vec::new();
        for (path, methods) in document()["paths"].as_object().unwrap() {
            for method in methods.as_object().unwrap().keys().filter(|m| *m != "parameters") {
                described.push((method.clone(), path.clone()));
            }
        }
        let mut routes: Vec<_> = ROUTES.iter().map(|(m, p)| (m.to_string(), p.to_string())).collect();
        described.sort();
        routes.sort();
        assert_eq!(described, routes);
        let source = include_str!("server.rs");
        for (_, path) in ROUTES {
            assert!(source.contains(&format!(".route(\"{path}\"")), "{path} is not served");
        }
        assert_eq!(source.matches("        .route(\"").count(), ROUTES.iter().map(|r| r.1).collect::<std::collections::BTreeSet<_>>().len());
    }

    /// Every field of a filled document is in its schema, and the other way round, all the way down.
    fn compare(value: &serde_json::Value, schema: &serde_json::Value, at: &str) {
        let all = document();
        let schema = match schema["$ref"].as_str() {
            Some(name) => &all["components"]["schemas"][name.rsplit('/').next().unwrap()],
            None => schema,
        };
        assert!(schema.is_object(), "{at} has no schema");
        match value {
            serde_json::Value::Object(map) if schema["properties"].is_object() => {
                let properties = schema["properties"].as_object().unwrap();
                let (mut a, mut b): (Vec<_>, Vec<_>) = (map.keys().collect(), properties.keys().collect());
                (a.sort(), b.sort());
                assert_eq!(a, b, "{at}");
                for (key, value) in map {
                    compare(value, &properties[key], &format!("{at}.{key}"));
                }
            }
            serde_json::Value::Array(items) => items.iter().for_each(|v| compare(v, &schema["items"], at)),
            _ => {}
        }
    }

    #[test]
    fn the_status_is_what_the_document_says() {
        let status = model::Status {
            schema: SCHEMA,
            fabric: "f".into(),
            version: "1".into(),
            pid: 1,
            file: "f.toml".into(),
            runtime: "/r".into(),
            uptime_s: 1.0,
            workers: vec![model::Worker {
                name: "w".into(),
                cpu: Some(1),
                budget: 64,
                busy_poll_us: 0,
                rounds: 1,
                sleeps: 1,
                polls: 1,
                slept_ns: 1,
            }],
            networks: vec![model::Network {
                name: "n".into(),
                subnet: "s".into(),
                gateway: "g".into(),
                router: None,
                uplink: "none".into(),
                domain: "d".into(),
                mtu: 1500,
                worker: "w".into(),
                macs: 1,
                copies: 1,
                flooded_unknown: 1,
                flooded_group: 1,
                leases: vec![model::Lease { mac: "m".into(), ip: "i".into(), name: None, expires_unix_s: 1 }],
            }],
            ports: vec![model::Port {
                name: "p".into(),
                rx_drops: [("guard".to_string(), 2)].into(),
                frames_per_turn: vec![3, 2, 1],
                last_fault: Some(model::Fault { kind: "ring".into(), detail: "d".into(), age_s: 1.0 }),
                ..model::Port::default()
            }],
            machines: vec![model::Machine {
                name: "m".into(),
                kind: "cell".into(),
                state: "failed".into(),
                pid: None,
                accel: "tcg".into(),
                adopted: false,
                restarts: 0,
                exit: Some(model::Exit { how: "signal 9".into(), last_lines: vec![] }),
                nics: vec![model::Nic { network: "n".into(), mac: "m".into(), ip: None }],
                console: "c".into(),
            }],
            forwards: vec![model::Forward {
                proto: "tcp".into(),
                listen: "l".into(),
                to: "t".into(),
                network: "n".into(),
            }],
        };
        let value = serde_json::to_value(&status).unwrap();
        compare(&value, &serde_json::json!({"$ref": "#/components/schemas/Status"}), "status");
        let text = metrics(&status);
        assert!(text.contains("tombolo_port_drops_total{fabric=\"f\",network=\"\",port=\"p\",direction=\"rx\",reason=\"guard\"} 2"));
        assert!(text.contains("le=\"1\"} 5") && text.contains("le=\"+Inf\"} 6"));
        for line in text.lines().filter(|l| !l.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            value.parse::<f64>().unwrap();
            let family = name.split('{').next().unwrap();
            let family = ["_bucket", "_sum", "_count"].iter().find_map(|s| family.strip_suffix(s)).unwrap_or(family);
            assert_eq!(text.matches(&format!("# TYPE {family} ")).count(), 1, "{family}");
        }
    }
}
