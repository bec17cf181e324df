//! The task that answers for a running fabric, until it is taken down.

use std::collections::{BTreeMap, VecDeque};
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use super::{APPLY_RUNS, FabricError, Running, Shared, apply, machine, namespaces};
use crate::api::apply::ApplyReport;
use crate::api::report::{MachineReport, PortReport};
use crate::api::{Console, Refusal, Reply, Request, Requests};
use crate::blocking;
use crate::file::FileError;

/// Requests that may wait.
const QUEUE: usize = 64;

/// How long answers have to reach their clients before this process leaves.
const ANSWERS: Duration = Duration::from_millis(20);

impl From<FabricError> for Refusal {
    fn from(error: FabricError) -> Self {
        let text = error.to_string();
        match error {
            FabricError::Unknown { .. } => Refusal::NotFound(text),
            FabricError::File(FileError::Faulty { problems, .. }) => {
                Refusal::Faulty { text, problems: problems.iter().map(Into::into).collect() }
            }
            FabricError::File(_) | FabricError::Plan(_) | FabricError::Request(_) => Refusal::Invalid(text),
            FabricError::Unfit(_) => Refusal::Unfit(text),
            FabricError::State(_) | FabricError::Machine(_) => Refusal::Conflict(text),
            FabricError::Busy(_) => Refusal::Busy(text),
            _ => Refusal::Failed(text),
        }
    }
}

/// Answers. The requester may have gone, which does not matter to us.
fn answer<T>(reply: Reply<T>, result: Result<T, FabricError>) {
    let _ = reply.send(result.map_err(Refusal::from));
}

/// Starts answering. The receiver is told once the fabric is down; a sender of requests that closed
/// before changes nothing.
pub fn drive(shared: Shared) -> (Requests, oneshot::Receiver<()>) {
    let (sender, mut receiver) = mpsc::channel(QUEUE);
    let (ended, end) = oneshot::channel();
    let keep = sender.clone();
    tokio::spawn(async move {
        let mut waiting = Waiting::default();
        while let Some(request) = waiting.next(&mut receiver).await {
            if let Request::HandOver { socket } = request {
                hand_over(&shared, socket, &mut waiting, &mut receiver).await;
                continue;
            }
            if let Request::Down(reply) = request {
                let result = shared.running.lock().await.take_down(false).await;
                answer(reply, result);
                break;
            }
            serve(&shared, request).await;
        }
        drop(keep);
        // The thread that started us may have gone.
        let _ = ended.send(());
    });
    (sender, end)
}

/// Requests that wait. Short ones go first, but not past each other, and after those that are there
/// at one time comes one of the others: neither `status` in an endless loop nor machines that are
/// slow to start keep the other kind waiting.
#[derive(Default)]
struct Waiting {
    short: VecDeque<Request>,
    other: VecDeque<Request>,
    others_turn: bool,
}

impl Waiting {
    fn len(&self) -> usize {
        self.short.len() + self.other.len()
    }

    fn push(&mut self, request: Request) {
        let is_short = matches!(request, Request::Status(_) | Request::Events(_) | Request::Down(_));
        if is_short { &mut self.short } else { &mut self.other }.push_back(request);
    }

    async fn next(&mut self, receiver: &mut mpsc::Receiver<Request>) -> Option<Request> {
        if let Some(request) = self.short.pop_front() {
            return Some(request);
        }
        if std::mem::take(&mut self.others_turn)
            && let Some(request) = self.other.pop_front()
        {
            return Some(request);
        }
        while self.len() < QUEUE
            && let Ok(request) = receiver.try_recv()
        {
            self.push(request);
        }
        self.others_turn = !self.short.is_empty();
        match self.short.pop_front().or_else(|| self.other.pop_front()) {
            Some(request) => Some(request),
            None => receiver.recv().await,
        }
    }
}

/// Answers a daemon that wants to take over, on a thread of its own, since everything is paused
/// until that one has decided. Meanwhile `status` is answered as it was before; other requests
/// wait.
async fn hand_over(shared: &Shared, socket: UnixStream, waiting: &mut Waiting, receiver: &mut mpsc::Receiver<Request>) {
    let before = shared.running.lock().await.status();
    let asked = shared.clone();
    let mut done = pin!(blocking::spawn(move || asked.running.blocking_lock().hand_over(socket)));
    loop {
        tokio::select! {
            done = &mut done => {
                if let Err(error) = done {
                    (shared.running.lock().await.say)(&format!("the handover failed: {error}"));
                }
                return;
            }
            Some(request) = receiver.recv(), if waiting.len() < QUEUE => match (request, &before) {
                (Request::Status(reply), Ok(status)) => answer(reply, Ok(status.clone())),
                (request, _) => waiting.push(request),
            },
        }
    }
}

/// Refuses what would change the fabric while an apply does; gives back every other request.
async fn unless_applying(shared: &Shared, request: Request) -> Option<Request> {
    if !shared.running.lock().await.applying {
        return Some(request);
    }
    fn busy<T>(reply: Reply<T>) -> Option<Request> {
        answer(reply, Err(FabricError::Busy(APPLY_RUNS.into())));
        None
    }
    match request {
        Request::AddPorts { reply, .. } => busy(reply),
        Request::ChangePort { reply, .. } => busy(reply),
        Request::RemovePort { reply, .. } => busy(reply),
        Request::RunMachine { reply, .. } => busy(reply),
        Request::StopMachine { reply, .. } => busy(reply),
        Request::RestartMachine { reply, .. } => busy(reply),
        Request::Apply { reply, .. } => busy(reply),
        Request::ChangeConfig { reply, .. } => busy(reply),
        request => Some(request),
    }
}

/// Carries out what was prepared. Machines take up to seconds to end; others are served meanwhile.
fn change(shared: &Shared, prepared: Result<apply::Prepared, FabricError>, reply: Reply<ApplyReport>) {
    match prepared {
        Ok(prepared) => {
            let shared = shared.clone();
            let me = shared.clone();
            let done = tokio::spawn(async move { apply::carry_out(&me, prepared).await });
            tokio::spawn(async move {
                let result = match done.await {
                    Ok(result) => result,
                    Err(error) => {
                        // A panic: others may change the fabric again.
                        shared.running.lock().await.applying = false;
                        Err(FabricError::State(format!("the apply ended halfway, which is a bug: {error}")))
                    }
                };
                answer(reply, result);
            });
        }
        Err(error) => answer(reply, Err(error)),
    }
}

async fn serve(shared: &Shared, request: Request) {
    let Some(request) = unless_applying(shared, request).await else { return };
    match request {
        Request::Apply { text, query, reply } => {
            let namespaces = shared.running.lock().await.new_in_file(&text, &query);
            let prepare = move |shared: &Shared, running: &mut Running, reply: Reply<_>| {
                change(shared, running.prepare_apply(&text, &query), reply);
            };
            once_they_answer(shared, namespaces, reply, prepare).await;
        }
        Request::ChangeConfig { patch, query, reply } => {
            let namespaces = shared.running.lock().await.new_in_change(&patch);
            let prepare = move |shared: &Shared, running: &mut Running, reply: Reply<_>| {
                change(shared, running.prepare_change(&patch, &query), reply);
            };
            once_they_answer(shared, namespaces, reply, prepare).await;
        }
        Request::Config(reply) => answer(reply, shared.running.lock().await.config_report()),
        Request::Status(reply) => answer(reply, shared.running.lock().await.status()),
        Request::Events(reply) => answer(reply, Ok(shared.running.lock().await.events.clone())),
        // Who asked for it has gone, such as a plugin that was killed: it, or who started it,
        // clears up what is there by now.
        Request::AddPorts { reply, .. } if reply.is_closed() => {}
        Request::AddPorts { sections, reply } => {
            let namespaces = namespaces::named_in(&sections);
            let add = move |_: &Shared, running: &mut Running, reply| answer(reply, add_ports(running, &sections));
            once_they_answer(shared, namespaces, reply, add).await;
        }
        Request::ChangePort { name, change, reply } => {
            let mut running = shared.running.lock().await;
            let result = running.set_rates(&name, &change).and_then(|()| running.status());
            let port = result.and_then(|status| {
                let port = status.ports.into_iter().find(|p| p.name == name);
                port.ok_or_else(|| FabricError::State(format!("port \"{name}\" is gone")))
            });
            answer(reply, port);
        }
        Request::RemovePort { name, reply } => answer(reply, shared.running.lock().await.remove(&name)),
        Request::RunMachine { sections, reply } => {
            let namespaces = namespaces::named_in(&sections);
            let run = move |_: &Shared, running: &mut Running, reply| answer(reply, run_machines(running, &sections));
            once_they_answer(shared, namespaces, reply, run).await;
        }
        Request::StopMachine { name, reply } => {
            let before = shared.running.lock().await.machine_reports().into_iter().find(|m| m.name == name);
            // Waiting for an end takes up to seconds; others are served meanwhile.
            let shared = shared.clone();
            tokio::spawn(async move {
                let result = machine::stop(&shared, &name, machine::Then::Forget).await;
                let after = shared.running.lock().await.machine_reports().into_iter().find(|m| m.name == name);
                let last = after.or(before.map(|m| MachineReport { state: "stopped".into(), pid: None, ..m }));
                let result = result.and_then(|()| last.ok_or_else(|| FabricError::State(format!("{name} is gone"))));
                answer(reply, result);
            });
        }
        Request::RestartMachine { name, reply } => {
            let shared = shared.clone();
            tokio::spawn(async move {
                let result = machine::stop(&shared, &name, machine::Then::Run).await;
                let machine = shared.running.lock().await.machine_reports().into_iter().find(|m| m.name == name);
                let gone = || FabricError::State(format!("{name} is gone"));
                answer(reply, result.and_then(|()| machine.ok_or_else(gone)));
            });
        }
        Request::Console { name, reply } => {
            let running = shared.running.lock().await;
            if !running.machines.contains_key(&name) {
                return answer(reply, Err(running.unknown("machine", &name)));
            }
            let console = running.console(&name);
            let Some(input) = running.domain_input(&name) else { return answer(reply, Ok(console)) };
            // XenStore may be slow; others are served meanwhile.
            tokio::spawn(async move {
                let input = blocking::spawn(input).await;
                let failed = |error| FabricError::State(format!("the input of {name}'s console: {error}"));
                answer(reply, input.map(|input| Console { input, ..console }).map_err(failed));
            });
        }
        Request::Capture { of, snaplen, filter, reply } => {
            answer(reply, shared.running.lock().await.capture(&of, snaplen, filter));
        }
        Request::Tables { homes, reply } => {
            answer(reply, shared.running.lock().await.tables(homes.as_deref()));
        }
        Request::PutRemotes { network, machine, body, reply } => {
            answer(reply, shared.running.lock().await.put_remotes(&network, &machine, &body));
        }
        Request::DeleteRemotes { network, machine, reply } => {
            answer(reply, shared.running.lock().await.delete_remotes(&network, &machine));
        }
        Request::Remotes { network, reply } => answer(reply, shared.running.lock().await.remotes(&network)),
        Request::PutLost { network, body, reply } => {
            answer(reply, shared.running.lock().await.put_lost(&network, &body));
        }
        Request::PutSpan { report, reply } => {
            shared.running.lock().await.put_span(*report);
            answer(reply, Ok(()));
        }
        Request::Span(reply) => answer(reply, Ok(shared.running.lock().await.span_report())),
        Request::Leave(reply) => {
            // What an apply that has just ended answers reaches its client first.
            drop(shared.running.lock().await);
            tokio::time::sleep(ANSWERS).await;
            answer(reply, Err(shared.running.lock().await.leave()));
        }
        // Both are the caller's.
        Request::HandOver { .. } => {}
        Request::Down(reply) => answer(reply, Ok(())),
    }
}

/// Does `work` once the paths of these namespaces have answered. Meanwhile others are served.
async fn once_they_answer<T: Send + 'static>(
    shared: &Shared,
    namespaces: BTreeMap<String, String>,
    reply: Reply<T>,
    work: impl FnOnce(&Shared, &mut Running, Reply<T>) + Send + 'static,
) {
    if namespaces.is_empty() {
        return work(shared, &mut *shared.running.lock().await, reply);
    }
    let shared = shared.clone();
    tokio::spawn(async move {
        if let Some((port, why)) = namespaces::silent(namespaces).await.pop_first() {
            return answer(reply, Err(FabricError::Port { port, why }));
        }
        let mut running = shared.running.lock().await;
        match () {
            () if running.applying => answer(reply, Err(FabricError::Busy(APPLY_RUNS.into()))),
            () if running.dir.is_none() => answer(reply, Err(FabricError::State("the fabric has ended".into()))),
            () if reply.is_closed() => {}
            () => work(&shared, &mut running, reply),
        }
    });
}

fn run_machines(running: &mut Running, sections: &str) -> Result<Vec<MachineReport>, FabricError> {
    let names = if running.machines.contains_key(sections.trim()) {
        let name = sections.trim().to_string();
        running.run(&name).map(|()| vec![name])
    } else if sections.contains('[') {
        running.add(sections)
    } else {
        Err(running.unknown("machine", sections.trim()))
    }?;
    Ok(pick_machines(running.machine_reports(), &names))
}

fn add_ports(running: &mut Running, sections: &str) -> Result<Vec<PortReport>, FabricError> {
    let names = running.add(sections)?;
    Ok(pick_ports(running.status()?.ports, &names))
}

fn pick_ports(all: Vec<PortReport>, names: &[String]) -> Vec<PortReport> {
    all.into_iter().filter(|p| names.contains(&p.name)).collect()
}

fn pick_machines(all: Vec<MachineReport>, names: &[String]) -> Vec<MachineReport> {
    all.into_iter().filter(|m| names.contains(&m.name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn short_requests_go_first_and_keep_no_other_waiting() {
        let (sender, mut receiver) = mpsc::channel(QUEUE);
        let mut waiting = Waiting::default();
        let mut order = String::new();
        let send = |kind| {
            let request = match kind {
                's' => Request::Status(oneshot::channel().0),
                _ => Request::Leave(oneshot::channel().0),
            };
            sender.try_send(request).unwrap();
        };
        "oososs".chars().for_each(send);
        for n in 0..40 {
            order.push(match waiting.next(&mut receiver).await.unwrap() {
                Request::Status(_) => 's',
                _ => 'o',
            });
            // More `status` comes all the time, and another of the others once.
            if n == 4 {
                send('o');
            }
            if n < 30 {
                send('s');
            }
            if receiver.is_empty() && waiting.len() == 0 {
                break;
            }
        }
        assert!(order.starts_with("sssos"), "{order}");
        assert_eq!(order.matches('o').count(), 4, "{order}");
        assert!(order[..22].matches('o').count() == 4, "{order}");
        assert_eq!(order.len(), 37, "{order}");
    }
}
