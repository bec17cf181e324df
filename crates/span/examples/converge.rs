//! How fast, and at what cost, all machines learn of a change: 2 to 100 machines with 100 members
//! each, on a virtual clock, with the code that runs in `tombolo-span`. Prints a line of JSON for
//! each number of machines:
//!
//! ```text
//! {"machines":100,"members":10000,"join_ms":…,"move_ms":…,"move_max_ms":…,"dead_s":…,"heal_ms":…,
//!  "bytes_per_change":…,"messages_per_change":…,"idle_bytes_per_s_per_machine":…,"state_bytes_per_machine":…,
//!  "look_us":…}
//! ```
//!
//! Messages take 0.2 to 2 ms. `join_ms` is from the start of one more machine until it knows all,
//! and all know it; `move_ms` is the median of 20 moves of a member, until all know; `dead_s` is
//! until all have forgotten a dead machine; `heal_ms` is from the end of a partition, in which each
//! part had changes, until all agree. `look_us` is real time: what a machine takes to compare its
//! members with those it announced.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use tombolo_span::simulation::{NETWORK, Network, World, mac};
use tombolo_span::{Action, Address, Control, Local, Member, Settings};

const MEMBERS: u32 = 100;
const MOVES: u32 = 20;

fn member(number: u32) -> Member {
    let [_, b, c, d] = number.to_be_bytes();
    let addresses = vec![Address { ip: [10, b, c, d].into(), fixed: false }];
    Member { mac: mac(number), name: Some(format!("member-{number}")), addresses }
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 100.0
}

/// From now until `done`, in virtual time.
fn takes(world: &mut World, what: &str, limit: Duration, done: impl FnMut(&World) -> bool) -> Duration {
    let begin = world.now;
    assert!(world.until(begin + limit, done), "{what}: not within {limit:?}");
    world.now - begin
}

/// Like `takes`, looked at every `step` only, where looking takes long.
fn settles(world: &mut World, what: &str, step: Duration) -> Duration {
    let begin = world.now;
    while !world.is_settled() {
        assert!(world.now - begin < Duration::from_secs(120), "{what}: not within 120 s");
        world.pass(step);
    }
    world.now - begin
}

/// Real time of one look of a machine with all members at rest, in µs.
fn look_us() -> f64 {
    let mut control = Control::new(Settings::new("a"), 1);
    let here = || {
        (0..MEMBERS)
            .map(|n| Local { member: member(n), placed: true, silent_for: Some(Duration::ZERO) })
            .collect::<Vec<_>>()
    };
    control.local(NETWORK, None, here(), Duration::ZERO);
    let mut times: Vec<f64> = (0..101)
        .map(|_| {
            let members = here();
            let begin = Instant::now();
            control.local(NETWORK, None, members, Duration::ZERO);
            begin.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    assert!(control.actions().iter().all(|action| !matches!(action, Action::Table { .. })));
    times[50]
}

fn measure(machines: usize, loss: f64) -> serde_json::Value {
    let network = Network { delay: (Duration::from_micros(200), Duration::from_millis(2)), loss };
    let mut world = World::new(machines, network, Settings::new("-"), 20261127);
    for at in 0..machines {
        for number in 0..MEMBERS {
            world.add(at, member(at as u32 * MEMBERS + number));
        }
    }
    for at in 1..machines {
        world.start(at);
        world.pass(Duration::from_millis(20));
    }
    settles(&mut world, "the start", Duration::from_millis(100));
    world.start(0);
    let join = settles(&mut world, "one more", Duration::from_millis(5));

    let (messages, bytes) = (world.messages, world.bytes);
    let idle = Duration::from_secs(60);
    world.pass(idle);
    let idle_bytes = (world.bytes - bytes) as f64 / idle.as_secs_f64();
    let idle_messages = (world.messages - messages) as f64 / idle.as_secs_f64();

    let mut moves = Vec::new();
    let (mut change_bytes, mut change_messages) = (0, 0);
    for n in 0..MOVES {
        let from = n as usize % machines;
        let to = (from + 1) % machines;
        let number = from as u32 * MEMBERS + n;
        let Some(moved) = world.remove(from, mac(number)) else { continue };
        let (messages, bytes) = (world.messages, world.bytes);
        world.add(to, moved);
        (change_bytes, change_messages) =
            (change_bytes + world.bytes - bytes, change_messages + world.messages - messages);
        moves.push(takes(&mut world, "a move", Duration::from_secs(30), |world| world.all_know(to, mac(number))));
        world.pass(Duration::from_millis(500));
    }
    moves.sort();

    let last = machines - 1;
    let name = world.machines[last].name.clone();
    world.kill(last);
    let dead = match machines {
        2 => None,
        _ => Some(takes(&mut world, "a death", Duration::from_secs(60), |world| {
            world.machines[..last].iter().all(|machine| !machine.tables.contains_key(&name))
        })),
    };
    world.start(last);
    settles(&mut world, "the return", Duration::from_millis(100));

    for at in 0..machines / 2 {
        world.machines[at].part = 1;
    }
    world.pass(Duration::from_secs(30));
    world.add(0, member(1_000_000));
    world.add(last, member(1_000_001));
    world.pass(Duration::from_secs(5));
    world.machines.iter_mut().for_each(|machine| machine.part = 0);
    let heal = settles(&mut world, "the healing", Duration::from_millis(20));

    let moves_done = moves.len() as f64;
    let state = world.machines[0]
        .control
        .as_ref()
        .map_or(0, |control| control.answer(&control.question("-")).map_or(0, |a| a.len()));
    serde_json::json!({
        "machines": machines,
        "loss": loss,
        "members": machines as u32 * MEMBERS,
        "join_ms": ms(join),
        "move_ms": ms(moves[moves.len() / 2]),
        "move_max_ms": ms(moves[moves.len() - 1]),
        "dead_s": dead.map(|dead| (dead.as_secs_f64() * 10.0).round() / 10.0),
        "heal_ms": ms(heal),
        "bytes_per_change": (change_bytes as f64 / moves_done).round(),
        "messages_per_change": change_messages as f64 / moves_done,
        "idle_bytes_per_s_per_machine": (idle_bytes / machines as f64).round(),
        "idle_messages_per_s_per_machine": (idle_messages / machines as f64 * 10.0).round() / 10.0,
        "state_bytes_per_machine": state * (machines - 1),
        "look_us": (look_us() * 10.0).round() / 10.0,
    })
}

fn main() -> ExitCode {
    let given: Result<Vec<usize>, _> = std::env::args().skip(1).map(|arg| arg.parse()).collect();
    let counts = match given {
        Ok(counts) if counts.is_empty() => vec![2, 5, 10, 20, 50, 100],
        Ok(counts) if counts.iter().all(|count| (2..=200).contains(count)) => counts,
        _ => {
            eprintln!("usage: converge [MACHINES...]   each 2 to 200");
            return ExitCode::from(2);
        }
    };
    for loss in [0.0, 0.01] {
        for machines in &counts {
            println!("{}", measure(*machines, loss));
        }
    }
    ExitCode::SUCCESS
}
