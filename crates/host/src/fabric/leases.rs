//! Keeps a network's DHCP leases over a restart: a snapshot, and a journal of what changed since.
//!
//! # Why a journal
//! A guest can renew its lease many times a second. Writing the whole table for each change would
//! make its cost grow with the number of *other* guests. Here a change is one line appended to the
//! journal. When the journal has grown to twice the snapshot's size it is folded into a new
//! snapshot, so that the cost per change stays constant on average.
//!
//! # Files
//! `NETWORK.leases.json` is the snapshot, one JSON document, replaced as a whole by rename.
//! `NETWORK.leases.journal` has one [`LeaseChange`] per line. A line holds everything about its
//! address. So reading the journal twice, or a journal that is older than the snapshot, gives the
//! same table. Lines that cannot be read (one that was torn by a crash or a full disk) are skipped
//! and reported.
//!
//! # Threads
//! One thread per network with DHCP writes. Neither a worker nor the control plane waits for a
//! disk: the worker leaves changes in memory, merged by address, and unparks the thread.
//! [`LeaseKeeper::finish`] waits for the last write, for [`FINISH_TIMEOUT`] at most.
//!
//! # Durability
//! A change is in the page cache within moments, so it survives a killed daemon. A snapshot is
//! synchronised to the disk before it replaces the old one. Journal lines are not: if the host is
//! lost, its guests are lost at the same moment. A client that returns may have its old address if
//! it is free.
//!
//! # Failure
//! A failed write (a full disk) is reported once and counted as `lease_write_failures`. The changes
//! are kept in memory, and the write is tried again every [`RETRY_PAUSE`]. The journal is cut back
//! to its last whole line.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::net::IpAddr;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::Thread;
use std::time::{Duration, Instant};

use tombolo_switch::gateway::{GatewayHandle, LeaseChange, LeaseRecord, LeaseStore};

use super::Say;
use super::events::LeaseWatch;

/// How long the last write is waited for.
const FINISH_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the writer waits after a failure.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// A journal shorter than this is never folded into a snapshot.
const MIN_JOURNAL_BYTES: u64 = 64 << 10;

/// Where the leases of one network are kept.
#[derive(Clone, Debug)]
pub(crate) struct LeaseFiles {
    snapshot: PathBuf,
    journal: PathBuf,
}

impl LeaseFiles {
    /// `snapshot` is the path of `NETWORK.leases.json`.
    pub(crate) fn new(snapshot: PathBuf) -> LeaseFiles {
        LeaseFiles { journal: snapshot.with_extension("journal"), snapshot }
    }

    /// What was kept. Files that are not there are a fabric's first start; what cannot be read is
    /// told and left out.
    pub(crate) fn load(&self, say: &Say) -> LeaseStore {
        let mut table: BTreeMap<IpAddr, LeaseRecord> = BTreeMap::new();
        if let Some(bytes) = self.read(&self.snapshot, say) {
            match serde_json::from_slice::<LeaseStore>(&bytes) {
                Ok(store) => table.extend(store.leases.into_iter().map(|record| (record.address, record))),
                Err(error) => say(&format!(
                    "leases: {} is not a lease table ({error}); clients keep their addresses when they renew",
                    self.snapshot.display()
                )),
            }
        }
        let journal = self.read(&self.journal, say).unwrap_or_default();
        let mut unread = 0;
        for line in journal.split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            match serde_json::from_slice(line) {
                Ok(LeaseChange::Bound(record)) => drop(table.insert(record.address, record)),
                Ok(LeaseChange::Freed(address)) => drop(table.remove(&address)),
                Err(_) => unread += 1,
            }
        }
        if unread != 0 {
            say(&format!("leases: {unread} lines of {} cannot be read and are left out", self.journal.display()));
        }
        LeaseStore { leases: table.into_values().collect() }
    }

    fn read(&self, path: &Path, say: &Say) -> Option<Vec<u8>> {
        match std::fs::read(path) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                say(&format!("leases: reading {}: {error}", path.display()));
                None
            }
        }
    }
}

/// Writes the files; see the head of the module.
struct Writer {
    files: LeaseFiles,
    journal: Option<File>,
    journal_bytes: u64,
    snapshot_bytes: u64,
    /// Changes that are in neither file yet. At most one for each address of the network.
    pending: BTreeMap<IpAddr, LeaseChange>,
    failing: bool,
    /// Is told of each change once, when it is taken from the gateway.
    watch: Option<LeaseWatch>,
}

impl Writer {
    fn new(files: LeaseFiles) -> Writer {
        let bytes = |path: &Path| std::fs::metadata(path).map_or(0, |meta| meta.len());
        let (journal_bytes, snapshot_bytes) = (bytes(&files.journal), bytes(&files.snapshot));
        Writer {
            files,
            journal: None,
            journal_bytes,
            snapshot_bytes,
            pending: BTreeMap::new(),
            failing: false,
            watch: None,
        }
    }

    /// Writes what has changed. Whether all is written.
    fn write(&mut self, gateway: &GatewayHandle, say: &Say) -> bool {
        for change in gateway.take_lease_changes() {
            if let Some(watch) = &mut self.watch {
                watch.note(&change, Instant::now());
            }
            self.pending.insert(change.address(), change);
        }
        if self.pending.is_empty() {
            return true;
        }
        let counters = gateway.counters();
        let done = self.append().and_then(|()| {
            counters.lease_writes.add(1);
            if self.journal_bytes <= MIN_JOURNAL_BYTES.max(2 * self.snapshot_bytes) {
                return Ok(());
            }
            // Its own copy of the table: no lock is held while it is written. What changes
            // meanwhile goes to the new journal.
            let folded = self.fold(&gateway.leases());
            match folded {
                Ok(()) => counters.lease_snapshots.add(1),
                // Not again for each change: when the journal has grown by as much.
                Err(_) => self.snapshot_bytes = self.journal_bytes,
            }
            folded
        });
        match done {
            Ok(()) => {
                if std::mem::take(&mut self.failing) {
                    say("leases are written again");
                }
            }
            Err(error) => {
                counters.lease_write_failures.add(1);
                if !std::mem::replace(&mut self.failing, true) {
                    say(&format!(
                        "leases cannot be written now, and this is retried every second: {}: {error}",
                        self.files.journal.display()
                    ));
                }
            }
        }
        self.pending.is_empty()
    }

    /// Appends the pending changes to the journal.
    fn append(&mut self) -> io::Result<()> {
        let mut text = Vec::new();
        for change in self.pending.values() {
            serde_json::to_writer(&mut text, change)?;
            text.push(b'\n');
        }
        let journal = match &mut self.journal {
            Some(journal) => journal,
            None => {
                let mut journal = OpenOptions::new().append(true).create(true).mode(0o600).open(&self.files.journal)?;
                self.journal_bytes = journal.metadata()?.len();
                if self.journal_bytes != 0 {
                    // The last line may have been torn; an empty line is none.
                    journal.write_all(b"\n")?;
                    self.journal_bytes += 1;
                }
                self.journal.insert(journal)
            }
        };
        if let Err(error) = journal.write_all(&text) {
            // If that fails as well, the next line starts behind half a line, and opening adds the
            // line's end.
            if journal.set_len(self.journal_bytes).is_err() {
                self.journal = None;
            }
            return Err(error);
        }
        self.journal_bytes += text.len() as u64;
        self.pending.clear();
        Ok(())
    }

    /// Replaces the snapshot by `store`, which holds all that the journal says, and starts the
    /// journal afresh.
    fn fold(&mut self, store: &LeaseStore) -> io::Result<()> {
        let text = serde_json::to_vec_pretty(store)?;
        let next = self.files.snapshot.with_extension("next");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&next)?;
        file.write_all(&text)?;
        file.sync_all()?;
        std::fs::rename(&next, &self.files.snapshot)?;
        self.snapshot_bytes = text.len() as u64;
        // A journal that stays, if this fails, says nothing that the snapshot does not.
        if let Some(journal) = &self.journal {
            journal.set_len(0)?;
            self.journal_bytes = 0;
        }
        Ok(())
    }
}

/// The thread that writes the leases of one network.
pub(crate) struct LeaseKeeper {
    thread: Thread,
    stop: Arc<AtomicBool>,
    done: Receiver<()>,
}

impl LeaseKeeper {
    /// Starts to keep the leases of `gateway` in `files`. [`LeaseKeeper::waker`] is to be called
    /// when some changed.
    pub(crate) fn start(
        files: LeaseFiles,
        gateway: GatewayHandle,
        say: Say,
        watch: LeaseWatch,
    ) -> io::Result<LeaseKeeper> {
        let stop = Arc::new(AtomicBool::new(false));
        let (ended, done): (Sender<()>, _) = channel();
        let told = stop.clone();
        let run = move || {
            // Dropped when the thread ends, however it does.
            let _ended = ended;
            let mut writer = Writer { watch: Some(watch), ..Writer::new(files) };
            loop {
                // Acquire, partner in `finish`: the changes made before it are seen by the last
                // write.
                let last = told.load(Ordering::Acquire);
                let all = writer.write(&gateway, &say);
                if last {
                    return;
                }
                // An unpark since the last park makes this return at once, so that no change is
                // missed.
                if all { std::thread::park() } else { std::thread::park_timeout(RETRY_PAUSE) }
            }
        };
        let thread = std::thread::Builder::new().name("leases".into()).spawn(run)?;
        Ok(LeaseKeeper { thread: thread.thread().clone(), stop, done })
    }

    /// Tells the thread that leases changed; for any thread, never blocks.
    pub(crate) fn waker(&self) -> impl Fn() + Send + Sync + 'static {
        let thread = self.thread.clone();
        move || thread.unpark()
    }

    /// Asks for the last write.
    pub(crate) fn stop(&self) {
        // Release, partner in `start`.
        self.stop.store(true, Ordering::Release);
        self.thread.unpark();
    }

    /// Asks for the last write and waits for it; `false` where it was not done in time.
    pub(crate) fn finish(&self) -> bool {
        self.stop();
        // The thread sends nothing: its end closes the channel.
        self.done.recv_timeout(FINISH_TIMEOUT) == Err(RecvTimeoutError::Disconnected)
    }
}

impl Drop for LeaseKeeper {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    fn record(last: u8, expires_unix_secs: u64) -> LeaseRecord {
        let name = Some(format!("host-{last}"));
        LeaseRecord { mac: [2, 0, 0, 0, 0, last], address: IpAddr::from([10, 0, 0, last]), name, expires_unix_secs }
    }

    fn listener() -> (Say, Arc<Mutex<Vec<String>>>) {
        let said = Arc::new(Mutex::new(Vec::new()));
        let to = said.clone();
        (Arc::new(move |text: &str| to.lock().unwrap().push(text.to_owned())), said)
    }

    fn put(writer: &mut Writer, change: LeaseChange) -> io::Result<()> {
        writer.pending.insert(change.address(), change);
        writer.append()
    }

    #[test]
    fn what_was_written_is_read_and_a_torn_last_line_costs_that_line_only() {
        let dir = tempfile::tempdir().unwrap();
        let files = LeaseFiles::new(dir.path().join("lab.leases.json"));
        let (say, said) = listener();
        assert_eq!(files.load(&say), LeaseStore::default());
        let mut writer = Writer::new(files.clone());
        for n in 1..=3 {
            put(&mut writer, LeaseChange::Bound(record(n, 100))).unwrap();
        }
        put(&mut writer, LeaseChange::Freed(IpAddr::from([10, 0, 0, 2]))).unwrap();
        put(&mut writer, LeaseChange::Bound(record(1, 200))).unwrap();
        assert_eq!(files.load(&say).leases, [record(1, 200), record(3, 100)]);
        assert!(said.lock().unwrap().is_empty());

        // At each length at which the last line may be torn, all before it is there.
        let whole = std::fs::read(&files.journal).unwrap();
        let last = whole[..whole.len() - 1].iter().rposition(|b| *b == b'\n').unwrap() + 1;
        for cut in last..whole.len() - 1 {
            std::fs::write(&files.journal, &whole[..cut]).unwrap();
            assert_eq!(files.load(&say).leases, [record(1, 100), record(3, 100)], "cut at {cut}");
        }
        assert!(said.lock().unwrap().last().unwrap().starts_with("leases: 1 lines of "));
        // Who goes on behind a torn line loses nothing of its own.
        let mut writer = Writer::new(files.clone());
        put(&mut writer, LeaseChange::Bound(record(9, 300))).unwrap();
        assert_eq!(files.load(&say).leases, [record(1, 100), record(3, 100), record(9, 300)]);
    }

    #[test]
    fn a_journal_that_is_older_than_the_snapshot_changes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let files = LeaseFiles::new(dir.path().join("lab.leases.json"));
        let (say, _) = listener();
        let mut writer = Writer::new(files.clone());
        for n in [1, 2, 1] {
            put(&mut writer, LeaseChange::Bound(record(n, 100 + u64::from(n)))).unwrap();
        }
        put(&mut writer, LeaseChange::Freed(IpAddr::from([10, 0, 0, 2]))).unwrap();
        let journal = std::fs::read(&files.journal).unwrap();
        let store = files.load(&say);
        writer.fold(&store).unwrap();
        assert_eq!(std::fs::metadata(&files.journal).unwrap().len(), 0);
        assert_eq!(files.load(&say), store);
        // As after a crash between the two.
        std::fs::write(&files.journal, journal).unwrap();
        assert_eq!(files.load(&say), store);
        // What was written to either before it could be read is told.
        std::fs::write(&files.snapshot, "{").unwrap();
        let (say, said) = listener();
        assert_eq!(files.load(&say), store);
        assert!(said.lock().unwrap()[0].contains("is not a lease table"));
    }

    #[test]
    fn a_disk_that_refuses_is_survived_and_what_it_missed_is_written_later() {
        let dir = tempfile::tempdir().unwrap();
        let files = LeaseFiles::new(dir.path().join("lab.leases.json"));
        let (say, _) = listener();
        let mut writer = Writer::new(files.clone());
        put(&mut writer, LeaseChange::Bound(record(1, 100))).unwrap();
        // The device that is always full takes the journal's place.
        let whole = writer.journal.replace(OpenOptions::new().append(true).open("/dev/full").unwrap());
        for n in 2..=4 {
            let refused = put(&mut writer, LeaseChange::Bound(record(n, 100))).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
            // What can be cut back is, so that the file is opened again next time; put the full one
            // back.
            writer.journal = Some(OpenOptions::new().append(true).open("/dev/full").unwrap());
        }
        assert_eq!(writer.pending.len(), 3);
        writer.journal = whole;
        writer.append().unwrap();
        assert!(writer.pending.is_empty());
        assert_eq!(files.load(&say).leases.len(), 4);
    }
}
