//! The services that run beside the fabric (`tombolo_rpc`), as Prometheus text: they are processes
//! of their own, each of which tells of itself.
//!
//! A service that does not answer in time is shown as down; it costs a page its timeout, and all of
//! them together at most `TIME_LIMIT`.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tombolo_rpc::client::{self, ConnectOptions};
use tombolo_rpc::folder;
use tombolo_rpc::histogram::Summary;
use tombolo_rpc::provider::Report;

use super::metrics::Page;

/// How long one service may take to tell of itself.
const TIMEOUT: Duration = Duration::from_millis(200);
/// How long all of them may take.
const TIME_LIMIT: Duration = Duration::from_secs(1);

/// The services of this user's folder by name, each with its report if it gave one. Blocks.
pub fn collect() -> BTreeMap<String, Option<Report>> {
    let Ok(folder) = folder::services() else { return BTreeMap::new() };
    let end = Instant::now() + TIME_LIMIT;
    let options = ConnectOptions { timeout: TIMEOUT, folder: Some(folder.clone()), ..ConnectOptions::default() };
    let report = |name: &str| (Instant::now() < end).then(|| client::report(name, &options).ok()).flatten();
    folder::list(&folder).into_iter().map(|name| (name.clone(), report(&name))).collect()
}

type Counter = (&'static str, &'static str, fn(&Report) -> u64);

const COUNTERS: &[Counter] = &[
    ("served_total", "Requests served.", |r| r.answers.served),
    ("overran_total", "Of those served, how many were done after their deadline.", |r| r.answers.overran),
    ("late_total", "Requests not served since their deadline had passed.", |r| r.answers.late),
    ("cancelled_total", "Requests cancelled by their clients.", |r| r.answers.cancelled),
    ("expired_total", "Requests that waited for longer than their time to live.", |r| r.answers.expired),
    ("failed_total", "Requests whose handler failed.", |r| r.answers.failed),
    ("abandoned_total", "Requests whose client had disconnected.", |r| r.answers.abandoned),
    ("refused_connections_total", "Connections refused.", |r| r.refused_connections),
    ("reclaimed_replies_total", "Replies held for too long and reclaimed.", |r| r.reclaimed_replies),
    ("ended_services_total", "Requests whose handler has ended, however.", |r| r.service.count),
    ("sleeps_total", "Times a worker slept.", |r| r.sleeps),
    ("polls_gained_total", "Times polling saved a sleep.", |r| r.polls_gained),
];

/// All that they tell.
pub fn render(services: &BTreeMap<String, Option<Report>>) -> String {
    let mut page = Page::default();
    let p = &mut page;
    let reports: Vec<(&str, &Report)> = services.iter().filter_map(|(n, r)| Some((n.as_str(), r.as_ref()?))).collect();
    p.family("tombolo_service_up", "gauge", "Whether the service answered with a report.");
    for (name, report) in services {
        p.sample("tombolo_service_up", &[("service", name)], u8::from(report.is_some()));
    }
    for (metric, help, value) in [
        ("clients", "Clients connected.", (|r| r.clients) as fn(&Report) -> u64),
        ("pending", "Requests that wait.", |r| r.pending),
    ] {
        let metric = format!("tombolo_service_{metric}");
        p.family(&metric, "gauge", help);
        for (name, report) in &reports {
            p.sample(&metric, &[("service", name)], value(report));
        }
    }
    p.family("tombolo_service_worker", "gauge", "The scheduling class in force of each worker; always 1.");
    for (name, report) in &reports {
        for (number, class) in report.workers.iter().enumerate() {
            let labels = [("service", *name), ("worker", &number.to_string()), ("class", class)];
            p.sample("tombolo_service_worker", &labels, 1);
        }
    }
    for (metric, help, value) in COUNTERS {
        let metric = format!("tombolo_service_{metric}");
        p.family(&metric, "counter", help);
        for (name, report) in &reports {
            p.sample(&metric, &[("service", name)], value(report));
        }
    }
    p.family("tombolo_service_refused_total", "counter", "Requests refused, by reason.");
    for (name, report) in &reports {
        let a = &report.answers;
        for (reason, count) in [
            ("queue-full", a.refused_queue_full),
            ("admission", a.refused_admission),
            ("memory", a.refused_memory),
            ("reply-memory", a.refused_reply_memory),
            ("stopping", a.refused_stopping),
        ] {
            p.sample("tombolo_service_refused_total", &[("service", name), ("reason", reason)], count);
        }
    }
    p.family(
        "tombolo_service_broken_clients_total",
        "counter",
        "Clients disconnected because they broke the protocol, by reason.",
    );
    for (name, report) in &reports {
        for (reason, count) in &report.broken_by {
            p.sample("tombolo_service_broken_clients_total", &[("service", name), ("reason", reason)], count);
        }
    }
    times(
        p,
        "queued",
        "From when a request was seen to when its service began, at most so for that part of the requests.",
        &reports,
        |r| &r.queued,
    );
    times(p, "service", "How long requests were served, at most so for that part of them.", &reports, |r| &r.service);
    page.text()
}

fn times(p: &mut Page, what: &str, help: &str, reports: &[(&str, &Report)], of: fn(&Report) -> &Summary) {
    let metric = format!("tombolo_service_{what}_seconds");
    p.family(&metric, "gauge", help);
    for (name, report) in reports {
        let s = of(report);
        for (part, ns) in [("0.5", s.p50_ns), ("0.99", s.p99_ns), ("0.999", s.p999_ns), ("1", s.max_ns)] {
            p.sample(&metric, &[("service", name), ("quantile", part)], super::metrics::seconds(ns));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tombolo_rpc::client::{CallOptions, Client};
    use tombolo_rpc::provider::{Options, Reply, Request, Service};

    #[test]
    fn a_page_shows_what_a_service_did() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Some(dir.path().to_path_buf());
        let echo = |request: &Request<'_>, reply: &mut Reply<'_>| {
            let _ = reply.write(&request.to_vec());
        };
        let options = Options { folder: folder.clone(), ..Options::default() };
        let service = Service::register("echo", options, echo).unwrap();
        let client = Client::connect_with("echo", &ConnectOptions { folder, ..ConnectOptions::default() }).unwrap();
        for _ in 0..3 {
            client.call(b"x", &CallOptions::default()).unwrap();
        }
        let services = BTreeMap::from([("echo".to_string(), Some(service.report())), ("gone".to_string(), None)]);
        let page = render(&services);
        assert_eq!(crate::api::metrics::check::read(&page).unwrap().len(), 30);
        for line in [
            "tombolo_service_up{service=\"echo\"} 1",
            "tombolo_service_up{service=\"gone\"} 0",
            "tombolo_service_clients{service=\"echo\"} 1",
            "tombolo_service_served_total{service=\"echo\"} 3",
            "tombolo_service_refused_total{service=\"echo\",reason=\"admission\"} 0",
            "tombolo_service_worker{service=\"echo\",worker=\"0\",class=\"normal\"} 1",
            "tombolo_service_ended_services_total{service=\"echo\"} 3",
        ] {
            assert!(page.lines().any(|l| l == line), "{line}\n{page}");
        }
        assert!(page.contains("tombolo_service_queued_seconds{service=\"echo\",quantile=\"0.99\"} 0.0"));
    }
}
