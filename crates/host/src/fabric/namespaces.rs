//! Namespaces at paths that do not answer.
//!
//! `open` and `stat` of a path wait for the server of its file system (NFS, FUSE) without any
//! limit. The control plane is one thread, so each path to a namespace is opened on a thread of its
//! own first. One that does not answer within [`ANSWER`] is not opened by the control plane: an
//! addition or a change is refused, and at a start the container's port is parked. A daemon that
//! takes over looks before the other one pauses.
//!
//! One thread waits for a path, however many ask for it: who asks while it waits gets the same
//! answer.
//!
//! # Limits
//! A change looks at the taps that are new or have other keys. One that is made again since its
//! network changes is not looked at. At most [`MOST`] threads wait. A server that answers here and
//! stops an instant later is still waited for.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tombolo_port::link::Netns;

use crate::blocking;
use crate::file::Fabric;

/// How long a file system has to answer.
const ANSWER: Duration = Duration::from_secs(5);
/// Paths that may be waited for at a time, in the whole process.
const MOST: usize = 64;

/// The paths that are being opened.
static OPENING: Places = Places::new();

/// Whether a path has answered, by paths.
struct Places(Mutex<BTreeMap<Arc<str>, watch::Receiver<bool>>>);

/// A place among those that are being opened, until it is dropped.
struct Place {
    all: &'static Places,
    path: Arc<str>,
    answered: watch::Sender<bool>,
}

/// Is ready when the path has answered, or with what is wrong.
type Answer = Pin<Box<dyn Future<Output = Result<(), String>> + Send>>;

impl Places {
    const fn new() -> Places {
        Places(Mutex::new(BTreeMap::new()))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, watch::Receiver<bool>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts to open the path, if no thread does so already. `None`: there is no place for it.
    fn ask(&'static self, path: &Arc<str>, open: fn(&str)) -> Option<Answer> {
        let mut all = self.lock();
        if let Some(answered) = all.get(path) {
            let mut answered = answered.clone();
            return Some(Box::pin(async move {
                let done = answered.wait_for(|answered| *answered).await;
                done.map(drop).map_err(|_| "the thread that opened it has ended; try again".to_string())
            }));
        }
        if all.len() >= MOST {
            return None;
        }
        let (answered, answer) = watch::channel(false);
        all.insert(path.clone(), answer);
        // The place is given back under the lock, also where no thread can be started.
        drop(all);
        let place = Place { all: self, path: path.clone(), answered };
        let opened = blocking::spawn(move || {
            open(&place.path);
            place.answered.send_replace(true);
        });
        Some(Box::pin(async { opened.await.map_err(|error| error.to_string()) }))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.all.lock().remove(&self.path);
    }
}

/// The namespaces of a fabric's containers and taps, by names of members.
pub(super) fn of(spec: &Fabric) -> BTreeMap<String, String> {
    let contained = spec.contained().map(|member| (member.name.to_string(), member.netns.to_string()));
    let taps = spec.taps.iter().filter_map(|tap| Some((tap.name.clone(), tap.netns.clone()?)));
    contained.chain(taps).collect()
}

/// Those of the members that `new` has and `old` has not, or has otherwise.
pub(super) fn new_in(new: &Fabric, old: &Fabric) -> BTreeMap<String, String> {
    let (mut all, before) = (of(new), of(old));
    let stands = |name: &str| new.taps.iter().filter(|tap| tap.name == name).all(|tap| old.taps.contains(tap));
    all.retain(|name, netns| before.get(name) != Some(netns) || !stands(name));
    all
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
            let opened = places.ask(&path, open);
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
                    Ok(Err(why)) => why,
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

    #[test]
    fn a_change_looks_at_new_taps_and_at_those_with_other_keys() {
        let read = |taps: &str| {
            let text = format!("name = \"demo\"\n[network.lan]\n{taps}");
            crate::file::parse(&text, std::path::Path::new("/x/demo.toml")).unwrap()
        };
        let old = read("[tap.a]\nnetns = \"/a\"\n[tap.b]\nnetns = \"/b\"\n[tap.c]\nnetns = \"/c\"\n[tap.d]\n");
        let new = "[tap.a]\nnetns = \"/a\"\n[tap.b]\nnetns = \"/other\"\n[tap.c]\nnetns = \"/c\"\ndevice = \"x\"\n\
                   [tap.d]\nnetns = \"/d\"\n[tap.e]\nnetns = \"/e\"\n";
        let found: Vec<_> = new_in(&read(new), &old).into_iter().collect();
        let expected = [("b", "/other"), ("c", "/c"), ("d", "/d"), ("e", "/e")];
        assert_eq!(found, expected.map(|(name, path)| (name.to_string(), path.to_string())));
    }

    #[tokio::test]
    async fn paths_that_do_not_answer_are_told_and_take_no_more_than_their_places() {
        static PLACES: Places = Places::new();
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
        let taken = || PLACES.lock().len();
        assert_eq!(taken(), 1, "it still waits");
        // However often it is asked for.
        let again = (0..2 * MOST).map(|n| (format!("again{n}"), "/dead/0".to_string())).collect();
        let told = look(again).await;
        assert!(told.len() == 2 * MOST && told.values().all(|why| why.contains("does not answer within 200ms")));
        assert_eq!(taken(), 1);
        assert_eq!(patient(named("live", 1)).await, BTreeMap::new());
        let told = look(named("dead", MOST + 1)).await;
        assert_eq!((told.len(), taken()), (MOST + 1, MOST));
        assert_eq!(told.values().filter(|why| why.contains("are waited for already")).count(), 1);
        assert!(look(named("live", 1)).await["live0"].contains("are waited for already"));
    }

    #[tokio::test]
    async fn all_who_ask_for_a_path_get_its_answer() {
        static PLACES: Places = Places::new();
        static GATE: Mutex<()> = Mutex::new(());
        fn open(path: &str) {
            drop(GATE.lock());
            assert!(!path.contains("bad"), "on purpose");
        }
        for (path, is_answered) in [("/late", true), ("/bad", false)] {
            let path = Arc::from(path);
            let held = GATE.lock().unwrap();
            let asked: Vec<_> = (0..9).map(|_| PLACES.ask(&path, open).unwrap()).collect();
            assert_eq!(PLACES.lock().len(), 1);
            drop(held);
            for answer in asked {
                assert_eq!(answer.await.is_ok(), is_answered);
            }
            // The thread gives its place back before it says that it has ended.
            assert_eq!(PLACES.lock().len(), 0);
        }
    }
}
