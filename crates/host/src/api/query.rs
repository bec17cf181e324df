//! What the address of a request says behind its `?`, and what is said of its faults.

use axum::extract::{FromRequestParts, Query};
use axum::http::request::Parts;
use axum::http::{StatusCode, Uri};
use serde::de::DeserializeOwned;

use super::report::ProblemReport;
use super::server::Answer;

/// The keys that a request takes in its address.
pub(super) trait Keys: DeserializeOwned {
    /// Each with what is expected of its value.
    const KEYS: &'static [(&'static str, &'static str)];
}

/// The keys of a request's address.
pub(super) struct Asked<T>(pub(super) T);

impl<T: Keys, S: Send + Sync> FromRequestParts<S> for Asked<T> {
    type Rejection = Answer;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Answer> {
        let error = match Query::<T>::try_from_uri(&parts.uri) {
            Ok(Query(query)) => return Ok(Asked(query)),
            Err(error) => error.body_text(),
        };
        let Ok(Query(given)) = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri) else {
            return Err(Answer::new(StatusCode::BAD_REQUEST, error));
        };
        let known = |key: &str| T::KEYS.iter().find(|(known, _)| *known == key);
        if let Some((key, _)) = given.iter().find(|(key, _)| known(key).is_none()) {
            let keys: Vec<_> = T::KEYS.iter().map(|(key, _)| *key).collect();
            return Err(wrong(key, format!("one of the keys {}", keys.join(", ")), "an unknown key"));
        }
        let twice = given.iter().find(|(key, _)| given.iter().filter(|(other, _)| other == key).count() > 1);
        if let Some((key, _)) = twice {
            return Err(wrong(key, "it once", "it more than once"));
        }
        // Each by itself: the one whose value does not fit.
        let alone = |pair: &str| Uri::builder().path_and_query(format!("/?{pair}")).build();
        let fits = |pair: &&str| alone(pair).is_ok_and(|uri| Query::<T>::try_from_uri(&uri).is_ok());
        let pairs = parts.uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
        let fault = pairs.zip(&given).find(|(pair, _)| !fits(pair)).map(|(_, given)| given);
        Err(match fault.and_then(|(key, value)| Some((key, value, known(key)?.1))) {
            Some((key, value, expected)) => wrong(key, expected, format!("{value:?}")),
            None => Answer::new(StatusCode::BAD_REQUEST, error),
        })
    }
}

/// The refusal of a request for one key of its address.
pub(super) fn wrong(key: &str, expected: impl Into<String>, found: impl Into<String>) -> Answer {
    let (expected, found) = (expected.into(), found.into());
    let text = format!("{key}: expected {expected}, found {found}");
    let (key, hint) = (key.to_string(), None);
    // The address has neither lines nor columns.
    Answer::new(StatusCode::BAD_REQUEST, text).problem(ProblemReport {
        of: "request".into(),
        line: 0,
        column: 0,
        key,
        expected,
        found,
        hint,
    })
}
