//! Latencies of many round trips: collected, then summed up.

use alloc::vec::Vec;
use core::fmt;

/// Samples in nanoseconds.
#[derive(Clone, Debug, Default)]
pub struct Latencies(Vec<u64>);

/// What is told of the samples, in nanoseconds. Percentiles are by nearest rank: the smallest
/// sample that so many are not above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// The smallest.
    pub min_ns: u64,
    /// Half are not above it.
    pub p50_ns: u64,
    /// 99 of 100 are not above it.
    pub p99_ns: u64,
    /// 999 of 1000 are not above it.
    pub p999_ns: u64,
    /// The largest.
    pub max_ns: u64,
}

impl Latencies {
    /// With room for `count` samples.
    pub fn with_capacity(count: usize) -> Latencies {
        Latencies(Vec::with_capacity(count))
    }

    /// Records one measured time.
    pub fn push(&mut self, ns: u64) {
        self.0.push(ns);
    }

    /// How many samples there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Sums the samples up; all zeros where there is none.
    pub fn summary(mut self) -> Summary {
        self.0.sort_unstable();
        let of_1000 = |part: usize| {
            let rank = (self.0.len() * part).div_ceil(1000).max(1);
            self.0.get(rank - 1).copied().unwrap_or(0)
        };
        Summary {
            min_ns: self.0.first().copied().unwrap_or(0),
            p50_ns: of_1000(500),
            p99_ns: of_1000(990),
            p999_ns: of_1000(999),
            max_ns: self.0.last().copied().unwrap_or(0),
        }
    }
}

/// As a JSON object, in microseconds.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Summary { min_ns, p50_ns, p99_ns, p999_ns, max_ns } = *self;
        let values = [("min", min_ns), ("p50", p50_ns), ("p99", p99_ns), ("p99.9", p999_ns), ("max", max_ns)];
        for (index, (name, ns)) in values.into_iter().enumerate() {
            let before = if index == 0 { '{' } else { ',' };
            write!(f, "{before}\"{name}\":{}.{}", ns / 1000, ns / 100 % 10)?;
        }
        f.write_str("}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn percentiles_are_by_nearest_rank() {
        let mut latencies = Latencies::default();
        for ns in (1..=1000).rev() {
            latencies.push(ns);
        }
        let summary = latencies.summary();
        assert_eq!(summary, Summary { min_ns: 1, p50_ns: 500, p99_ns: 990, p999_ns: 999, max_ns: 1000 });
        let mut one = Latencies::default();
        one.push(7);
        assert_eq!(one.summary(), Summary { min_ns: 7, p50_ns: 7, p99_ns: 7, p999_ns: 7, max_ns: 7 });
        assert_eq!(Latencies::default().summary(), Summary::default());
    }

    #[test]
    fn a_summary_is_json_in_microseconds() {
        let summary = Summary { min_ns: 999, p50_ns: 1000, p99_ns: 12_345, p999_ns: 50, max_ns: 2_000_000 };
        assert_eq!(summary.to_string(), r#"{"min":0.9,"p50":1.0,"p99":12.3,"p99.9":0.0,"max":2000.0}"#);
    }
}
