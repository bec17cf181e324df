//! A control loop over an ivshmem link, without IP: a controller sends a command each period, and a
//! plant answers with its measurement.
//!
//! Two cells run this app on one link, with no switch between them: one with `role=controller`, one
//! with `role=plant`. The plant is a first-order lag. The controller is a PI controller that brings
//! it to a set point. At the end the controller prints one line of JSON: how long the replies took,
//! and how many periods passed without one. Both leave with an exit code.
//!
//! | word | meaning | default |
//! | --- | --- | --- |
//! | `role=controller`, `role=plant` | which of the two | |
//! | `link=NAME` | the link | `control` |
//! | `period_us=N` | microseconds between two commands; 0: the next one follows on the reply | 1000 |
//! | `count=N` | periods | 5000 |
//! | `wait=sleep` | between two looks the processor sleeps; the network and other tasks wait | this |
//! | `wait=tasks` | the network and other tasks have their turns | |
//! | `wait=spin` | the processor does not sleep | |
//! | `what=doorbell` | no records: a number in the sections and a ring, back and forth, as fast as it goes | records |
//! | `max_missed=N` | periods without a reply that are still a success | one in a hundred |
//! | `patience_s=N` | how long to wait for the other one, and for any reply where the period is 0 | 20 |
#![no_std]
#![no_main]

extern crate alloc;

use core::sync::atomic::Ordering;
use tombolo_cell::{Channel, ChannelError, ChannelOptions, ExitCode, Link, Net, exit, println};
use tombolo_cells::latency::{Latencies, Summary};

tombolo_cell::app!(control);

const SECOND_NS: u64 = 1_000_000_000;
/// Where the controller wants the plant to be, in thousandths.
const SET_POINT: i64 = 1_000_000;
/// How near counts as there: one in a hundred.
const TOLERANCE: i64 = 10_000;
/// The number of the record that ends the loop.
const STOP: u64 = u64::MAX;
/// The same for the bare doorbell.
const STOP_WORD: u32 = u32::MAX;
/// What a state word says of a peer that takes part in the bare doorbell.
const HERE: u32 = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Wait {
    Sleep,
    Tasks,
    Spin,
}

struct Settings {
    wait: Wait,
    wait_name: &'static str,
    period_ns: u64,
    count: u64,
    max_missed: u64,
    patience_ns: u64,
}

fn fail(why: core::fmt::Arguments<'_>) -> ! {
    println!("control: {why}");
    exit(ExitCode::Failure)
}

async fn control(net: Net) {
    let config = net.config();
    let (wait, wait_name) = match config.get("wait").unwrap_or("sleep") {
        "sleep" => (Wait::Sleep, "sleep"),
        "tasks" => (Wait::Tasks, "tasks"),
        "spin" => (Wait::Spin, "spin"),
        other => fail(format_args!("wait={other}: expected sleep, tasks or spin")),
    };
    let number = |key: &str, default: u64| match (config.get(key), config.number(key)) {
        (None, _) => default,
        (_, Some(value)) => value,
        (Some(text), None) => fail(format_args!("{key}={text}: expected a number")),
    };
    let count = number("count", 5000).clamp(1, 1 << 20);
    let settings = Settings {
        wait,
        wait_name,
        period_ns: number("period_us", 1000) * 1000,
        count,
        max_missed: number("max_missed", count / 100),
        patience_ns: number("patience_s", 20) * SECOND_NS,
    };
    let name = config.get("link").unwrap_or("control");
    let is_controller = match config.get("role") {
        Some("controller") => true,
        Some("plant") => false,
        other => fail(format_args!("role={}: expected controller or plant", other.unwrap_or_default())),
    };
    match config.get("what").unwrap_or("records") {
        "records" => {
            let mut channel = match net.channel(name, ChannelOptions::default()) {
                Ok(channel) => channel,
                Err(error) => fail(format_args!("{error}")),
            };
            meet(&net, &mut channel, settings.patience_ns).await;
            if is_controller {
                controller(&net, &mut channel, &settings).await;
            } else {
                plant(&net, &mut channel, &settings).await;
            }
        }
        "doorbell" => {
            let link = match net.link(name) {
                Ok(link) => link,
                Err(error) => fail(format_args!("{error}")),
            };
            doorbell(&net, &link, &settings, is_controller).await;
        }
        other => fail(format_args!("what={other}: expected records or doorbell")),
    }
}

/// Waits for the other one.
async fn meet(net: &Net, channel: &mut Channel, patience_ns: u64) {
    match net.within(patience_ns, channel.up()).await {
        Some(Ok(())) => {}
        Some(Err(error)) => fail(format_args!("link {:?}: {error}", channel.link().name())),
        None => {
            fail(format_args!("no peer joined link {:?} within {} s", channel.link().name(), patience_ns / SECOND_NS))
        }
    }
}

/// A number and a value, in each direction: 16 bytes.
fn encode(number: u64, value: i64) -> [u8; 16] {
    let mut record = [0; 16];
    record[..8].copy_from_slice(&number.to_le_bytes());
    record[8..].copy_from_slice(&value.to_le_bytes());
    record
}

fn decode(record: &[u8; 16]) -> (u64, i64) {
    let (number, value) = record.split_at(8);
    let word = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
    (word(number), word(value) as i64)
}

/// The next record until `until_ns`, in the way that was asked for.
async fn receive(
    net: &Net,
    channel: &mut Channel,
    wait: Wait,
    until_ns: u64,
) -> Result<Option<(u64, i64)>, ChannelError> {
    let mut record = [0; 16];
    let received = match wait {
        Wait::Sleep | Wait::Spin => channel.recv_alone(&mut record, until_ns, wait == Wait::Spin)?,
        Wait::Tasks => {
            let left_ns = until_ns.saturating_sub(net.now_ns());
            net.within(left_ns, channel.recv(&mut record)).await.transpose()?
        }
    };
    Ok(received.filter(|got| got.len == record.len()).map(|_| decode(&record)))
}

async fn wait_until(net: &Net, link: &Link, wait: Wait, at_ns: u64) {
    match wait {
        Wait::Sleep | Wait::Spin => _ = link.until_alone(at_ns, wait == Wait::Spin, || None::<()>),
        Wait::Tasks => net.sleep_until(at_ns).await,
    }
}

/// Sends; the queue is longer than what is ever under way, so a full one is a peer that does not
/// take what it gets.
fn send(channel: &mut Channel, number: u64, value: i64) -> Result<(), ChannelError> {
    match channel.send(&encode(number, value)) {
        Ok(true) => Ok(()),
        Ok(false) => Err(ChannelError::Down),
        Err(error) => Err(error),
    }
}

/// One period: a command, and the reply to it until `until_ns`. What the plant measured, and how
/// long that took.
async fn period(
    net: &Net,
    channel: &mut Channel,
    wait: Wait,
    number: u64,
    command: i64,
    until_ns: u64,
) -> Result<Option<(i64, u64)>, ChannelError> {
    let sent_ns = net.now_ns();
    send(channel, number, command)?;
    while let Some((reply, measured)) = receive(net, channel, wait, until_ns).await? {
        // One to an earlier command came too late for it.
        if reply == number {
            return Ok(Some((measured, net.now_ns() - sent_ns)));
        }
    }
    Ok(None)
}

async fn controller(net: &Net, channel: &mut Channel, settings: &Settings) {
    let Settings { wait, period_ns, count, .. } = *settings;
    let (mut trips, mut lateness) =
        (Latencies::with_capacity(count as usize), Latencies::with_capacity(count as usize));
    let (mut missed, mut measured, mut integral) = (0, 0i64, 0i64);
    let start_ns = net.now_ns() + period_ns.max(1_000_000);
    for number in 0..count {
        let at_ns = if period_ns == 0 { net.now_ns() } else { start_ns + number * period_ns };
        let until_ns = at_ns + if period_ns == 0 { settings.patience_ns } else { period_ns };
        if net.now_ns() >= until_ns {
            missed += 1;
            continue;
        }
        let link = channel.link().clone();
        wait_until(net, &link, wait, at_ns).await;
        lateness.push(net.now_ns() - at_ns);
        let error = SET_POINT - measured;
        integral += error / 64;
        match period(net, channel, wait, number, integral + error / 4, until_ns).await {
            Ok(Some((value, ns))) => {
                measured = value;
                trips.push(ns);
                // Read, but later than it was wanted: part of the distribution, and a period
                // without a reply in time.
                missed += u64::from(net.now_ns() > until_ns);
            }
            Ok(None) => missed += 1,
            Err(ChannelError::Down) => {
                missed += 1;
                meet(net, channel, settings.patience_ns).await;
            }
            Err(error) => fail(format_args!("{error}")),
        }
    }
    // The plant ends with it, and is given its time: one that finds the link down before it has
    // read this would wait for the next controller.
    let _ = period(net, channel, Wait::Tasks, STOP, 0, net.now_ns() + settings.patience_ns).await;
    let is_reached = (SET_POINT - measured).abs() <= TOLERANCE;
    let is_in_time = missed <= settings.max_missed;
    if !is_in_time {
        println!(
            "control: failed: {missed} of {} periods had no reply in time, and max_missed={} was allowed",
            settings.count, settings.max_missed
        );
    }
    if !is_reached {
        println!("control: failed: the plant is at {measured}, expected {SET_POINT}");
    }
    report(channel.link(), "records", settings, missed, trips, lateness, Some(is_reached));
    exit(if is_in_time && is_reached { ExitCode::Success } else { ExitCode::Failure })
}

async fn plant(net: &Net, channel: &mut Channel, settings: &Settings) {
    let (mut value, mut commands) = (0i64, 0u64);
    loop {
        let until_ns = net.now_ns() + settings.patience_ns;
        match receive(net, channel, settings.wait, until_ns).await {
            Ok(Some((number, command))) => {
                if number != STOP {
                    value += (command - value) / 16;
                    commands += 1;
                }
                if send(channel, number, value).is_ok() && number == STOP {
                    println!("control: plant: {commands} commands, at {value} of {SET_POINT}");
                    exit(ExitCode::Success)
                }
            }
            Ok(None) => {
                fail(format_args!("plant: no command for {} s after {commands}", settings.patience_ns / SECOND_NS))
            }
            Err(ChannelError::Down) => meet(net, channel, settings.patience_ns).await,
            Err(error) => fail(format_args!("plant: {error}")),
        }
    }
}

/// The bare doorbell: a number in the own section, a ring; the other one writes the same number
/// into its own, and rings.
async fn doorbell(net: &Net, link: &Link, settings: &Settings, is_controller: bool) {
    let peer = 1 - link.own_id().min(1);
    let (own, Some(other)) = (link.own_output(), link.output(peer)) else {
        fail(format_args!("link {:?} has no peer {peer}", link.name()))
    };
    // Release and acquire: a later version may have data beside the number. Cannot fail: a section
    // is pages.
    let write = |word: u32| _ = own.store_u32(0, word, Ordering::Release);
    let read = || other.load_u32(0, Ordering::Acquire).unwrap_or(0);
    write(0);
    link.set_state(HERE);
    let here = || (link.state(peer) == HERE).then_some(());
    // Looked at also without a ring: the first ones of a machine that starts can get lost.
    let deadline_ns = net.now_ns() + settings.patience_ns;
    while net.within(10_000_000, link.until(here)).await.is_none() {
        if net.now_ns() > deadline_ns {
            fail(format_args!("no peer joined link {:?} within {} s", link.name(), settings.patience_ns / SECOND_NS));
        }
    }
    let spin = settings.wait == Wait::Spin;
    let mut trips = Latencies::with_capacity(settings.count as usize);
    let changed = async |from: u32| -> u32 {
        let look = || Some(read()).filter(|word| *word != from);
        let found = match settings.wait {
            Wait::Tasks => net.within(settings.patience_ns, link.until(look)).await,
            Wait::Sleep | Wait::Spin => link.until_alone(net.now_ns() + settings.patience_ns, spin, look),
        };
        found.unwrap_or_else(|| fail(format_args!("no ring for {} s", settings.patience_ns / SECOND_NS)))
    };
    if is_controller {
        for number in 1..=settings.count as u32 {
            let start_ns = net.now_ns();
            write(number);
            link.ring_traffic(peer);
            let answer = changed(number - 1).await;
            if answer != number {
                fail(format_args!("the answer to {number} was {answer}"));
            }
            trips.push(net.now_ns() - start_ns);
        }
        write(STOP_WORD);
        link.ring_traffic(peer);
        report(link, "doorbell", settings, 0, trips, Latencies::default(), None);
    } else {
        let mut last = 0;
        loop {
            last = changed(last).await;
            if last == STOP_WORD {
                break;
            }
            write(last);
            link.ring_traffic(peer);
        }
        println!("control: plant: {} rings", link.rings());
    }
    exit(ExitCode::Success)
}

/// One line for people, and one for programs.
fn report(
    link: &Link,
    what: &str,
    settings: &Settings,
    missed: u64,
    trips: Latencies,
    lateness: Latencies,
    is_reached: Option<bool>,
) {
    let (replies, count, period_us) = (trips.len(), settings.count, settings.period_ns / 1000);
    let (trip, late): (Summary, Summary) = (trips.summary(), lateness.summary());
    let wake = if link.has_doorbell() { "doorbell" } else { "polled" };
    println!(
        "control: {count} periods of {period_us} us, {replies} replies, {missed} not in time; round trip p50 {} us, p99 {} us, longest {} us",
        trip.p50_ns / 1000,
        trip.p99_ns / 1000,
        trip.max_ns / 1000
    );
    let reached = match is_reached {
        Some(true) => "true",
        Some(false) => "false",
        None => "null",
    };
    println!(
        "{{\"app\":\"control\",\"what\":\"{what}\",\"wake\":\"{wake}\",\"wait\":\"{}\",\"period_us\":{period_us},\"periods\":{count},\
         \"replies\":{replies},\"missed\":{missed},\"rtt_us\":{trip},\"late_us\":{late},\"set_point_reached\":{reached}}}",
        settings.wait_name
    );
}
