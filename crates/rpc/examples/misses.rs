//! Deadlines missed against load, by order of service, on a virtual clock: one JSON object a line.
//!
//! usage: misses [SEEDS]

use tombolo_rpc::schedule::Late;
use tombolo_rpc::simulate::{Order, least_missed, run, task_set};

const SECOND_NS: u64 = 1_000_000_000;

fn main() {
    let seeds: u64 = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(10);
    for percent in (50..=120).step_by(5) {
        let load = f64::from(percent) / 100.0;
        let ratio = |order, admission| {
            let runs = (0..seeds).map(|seed| run(&task_set(load), order, admission, Late::Refuse, SECOND_NS, seed));
            runs.map(|outcome| outcome.miss_ratio()).sum::<f64>() / seeds as f64
        };
        println!(
            "{{\"load\":{load:.2},\"least\":{:.5},\"edf\":{:.5},\"edf_admission\":{:.5},\"fifo\":{:.5},\"priority\":{:.5}}}",
            least_missed(load),
            ratio(Order::Edf, false),
            ratio(Order::Edf, true),
            ratio(Order::Fifo, false),
            ratio(Order::Priority, false),
        );
    }
}
