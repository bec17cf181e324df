//! Namespaces at paths that do not answer.
//!
//! `open` and `stat` of a path wait for the server of its file system (NFS, FUSE) without any
//! limit. The control plane is one thread, so each path to a namespace is opened on a thread of its
//! own first. One that does not answer within [`ANSWER`] is not opened by the control plane: an
//! addition is refused, and at a start the container's port is parked. A daemon that takes over looks
//! before the other one pauses.
//!
//! # Limits
//! At most [`MOST`] threads wait. A server that answers here and stops an instant later is still
//! waited for.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tombolo_port::link::Netns;

use crate::blocking;
use crate::file::Fabric;

/// How long a file system has to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Paths that may be waited for at a time, in the whole process.
const MOST: usize = 64;

/// The paths that are being opened.
static OPENING: Places = Places(AtomicUsize::new(0));

struct Places(AtomicUsize);

/// A place among those that are being opened, until it is dropped.
struct Place(&'static Places);

impl Places {
    // Only a count, which publishes nothing: Relaxed is enough here and below.
    fn take(&'static self) -> Option<Place> {
        let place = |n| (n < MOST).then_some(n + 1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, place).ok().map(|_| Place(self))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The namespaces of the containers of a fabric, by names of members.
pub(super) fn of(spec: &Fabric) -> BTreeMap<String, String> {
    spec.contained().map(|member| (member.name.to_string(), member.netns.to_string())).collect()
}

/// The namespaces of sections of a fabric file, by names of members. Faults of the text are not its
/// matter.
pub(super) fn named_in(text: &str) -> BTreeMap<String, String> {
    let Ok(root) = text.parse::<toml::Table>() else { return BTreeMap::new() };
    let sections = ["tap", "port"].into_iter().filter_map(|kind| root.get(kind)?.as_table()).flatten();
    sections.filter_map(|(name, keys)| Some((name.clone(), keys.get("netns")?.as_str()?.to_string()))).collect()
}

/// Those of the namespaces, by names of members, whose paths do not answer, and what to say of it.
pub(super) async fn silent(namespaces: BTreeMap<String, String>) -> BTreeMap<String, String> {
    silent_of(namespaces, &OPENING, ANSWER, |path| drop(Netns::open(path))).await
}

async fn silent_of(
    namespaces: BTreeMap<String, String>,
    places: &'static Places,
    answer: Duration,
    open: fn(&str),
) -> BTreeMap<String, String> {
    let mut silent = BTreeMap::new();
    let mut rest = namespaces.into_iter().peekable();
    while rest.peek().is_some() {
        let begun = rest.by_ref().take(MOST / 2).map(|(member, path)| {
            let path = Arc::<str>::from(path);
            let opened = places.take().map(|place| {
                let theirs = path.clone();
                blocking::spawn(move || {
                    let _place = place;
                    open(&theirs);
                })
            });
            (member, path, opened)
        });
        // All are begun before the first is waited for, so they have their time together.
        let begun: Vec<_> = begun.collect();
        let limit = tokio::time::Instant::now() + answer;
        for (member, path, opened) in begun {
            let why = match opened {
                None => format!("{MOST} paths are waited for already that do not answer"),
                Some(opened) => match tokio::time::timeout_at(limit, opened).await {
                    Ok(Ok(())) => continue,
                    Ok(Err(error)) => error.to_string(),
                    Err(_) => format!(
                        "its file system does not answer within {answer:?}; see whether the server of that file system runs"
                    ),
                },
            };
            silent.insert(member, format!("network namespace {path}: {why}"));
        }
    }
    silent
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_are_found_in_sections_of_taps_and_ports() {
        let text =
            "[tap.a]\nnetns = \"/a\"\n[tap.b]\n[port.c]\nnetns = \"c\"\n[vm.d]\nnetns = \"no\"\n[port.e]\nnetns = 5";
        let found: Vec<_> = named_in(text).into_iter().collect();
        assert_eq!(found, [("a".into(), "/a".into()), ("c".into(), "c".into())]);
        assert!(named_in("port = 1").is_empty() && named_in("[tap").is_empty());
    }

    #[tokio::test]
    async fn paths_that_do_not_answer_are_told_and_take_no_more_than_their_places() {
        static PLACES: Places = Places(AtomicUsize::new(0));
        fn open(path: &str) {
            if path.contains("dead") {
                std::thread::park();
            }
        }
        let named = |kind: &str, n: usize| (0..n).map(|n| (format!("{kind}{n}"), format!("/{kind}/{n}"))).collect();
        let answer = Duration::from_millis(200);
        let look = |paths| silent_of(paths, &PLACES, answer, open);
        let patient = |paths| silent_of(paths, &PLACES, Duration::from_secs(60), open);
        assert_eq!(patient(named("live", 3 * MOST)).await, BTreeMap::new());
        let told = look(named("dead", 1)).await;
        let why = &told["dead0"];
        assert!(why.contains("/dead/0") && why.contains("does not answer within 200ms"), "{why}");
        assert_eq!(PLACES.0.load(Ordering::Relaxed), 1, "it still waits");
        let told = look(named("dead", MOST)).await;
        assert_eq!((told.len(), PLACES.0.load(Ordering::Relaxed)), (MOST, MOST));
        assert_eq!(told.values().filter(|why| why.contains("are waited for already")).count(), 1);
        assert!(look(named("live", 1)).await["live0"].contains("are waited for already"));
    }
}
