//! A client of the API: one request, one connection.

use std::path::{Path, PathBuf};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use super::model::Refusal;

/// Why a request got no answer, or a refusal.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No fabric listens.
    #[error("asking the fabric at {}: {source}; is it running? `tombolo up` starts one", path.display())]
    Connect {
        /// Its socket.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The connection broke.
    #[error("asking the fabric at {}: {what}; it may have ended meanwhile", path.display())]
    Broken {
        /// Its socket.
        path: PathBuf,
        /// What happened.
        what: String,
    },
    /// The fabric said no.
    #[error("{0}")]
    Refused(String),
    /// The answer is not what the schema says.
    #[error("the fabric's answer is not understood: {0}; are the program and the daemon of the same version?")]
    Answer(String),
}

/// Asks one fabric.
#[derive(Debug, Clone)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// A client of the fabric whose API socket is `socket`.
    pub fn new(socket: &Path) -> Client {
        Client { socket: socket.into() }
    }

    fn broken(&self, what: impl std::fmt::Display) -> ClientError {
        ClientError::Broken { path: self.socket.clone(), what: what.to_string() }
    }

    /// Sends a request and returns an answer of 2xx, whose body is still to come.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn request(&self, method: Method, path: &str, body: Vec<u8>) -> Result<Response<Incoming>, ClientError> {
        let stream = UnixStream::connect(&self.socket).await;
        let stream = stream.map_err(|source| ClientError::Connect { path: self.socket.clone(), source })?;
        let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
        let (mut sender, connection) = handshake.map_err(|e| self.broken(e))?;
        // A broken connection shows in the request that uses it.
        tokio::spawn(async move { drop(connection.await) });
        let request = Request::builder().method(method).uri(path).header("host", "tombolo");
        let request = request.header("content-type", "application/json").body(Full::new(Bytes::from(body)));
        let request = request.map_err(|e| self.broken(e))?;
        let response = sender.send_request(request).await.map_err(|e| self.broken(e))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let body = self.collect(response).await?;
        let said = serde_json::from_slice::<Refusal>(&body).map(|r| r.error);
        Err(ClientError::Refused(said.unwrap_or_else(|_| format!("the fabric answered {status}"))))
    }

    /// The whole body of an answer.
    ///
    /// # Errors
    /// [`ClientError::Broken`].
    pub async fn collect(&self, response: Response<Incoming>) -> Result<Vec<u8>, ClientError> {
        let body = response.into_body().collect().await.map_err(|e| self.broken(e))?;
        Ok(body.to_bytes().to_vec())
    }

    /// Asks for a document.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn get<T: serde::de::DeserializeOwned>(&self, path: &str) -> Result<T, ClientError> {
        let response = self.request(Method::GET, path, vec![]).await?;
        let body = self.collect(response).await?;
        serde_json::from_slice(&body).map_err(|e| ClientError::Answer(e.to_string()))
    }

    /// Sends a request whose answer has no body.
    ///
    /// # Errors
    /// [`ClientError`].
    pub async fn send(&self, method: Method, path: &str, body: Vec<u8>) -> Result<(), ClientError> {
        let response = self.request(method, path, body).await?;
        self.collect(response).await.map(drop)
    }
}

/// A name as one segment of a path.
pub fn segment(name: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    name.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}
