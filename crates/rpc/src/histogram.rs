//! Histograms of times: 16 buckets for each power of two, so that a value is known to within 6 %,
//! in 976 counters.
//!
//! Recording is one relaxed increment from any thread. A snapshot taken meanwhile may miss what is
//! being recorded.

use std::sync::atomic::{AtomicU64, Ordering};

const SUB_BITS: u32 = 4;
const SUB: u64 = 1 << SUB_BITS;
const BUCKETS: usize = (SUB as usize) * (64 - SUB_BITS as usize + 1);

/// Counters of times in ns.
#[derive(Debug)]
pub struct Histogram {
    buckets: Box<[AtomicU64]>,
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram { buckets: (0..BUCKETS).map(|_| AtomicU64::new(0)).collect() }
    }
}

fn bucket(ns: u64) -> usize {
    if ns < SUB {
        return ns as usize;
    }
    let shift = ns.ilog2() - SUB_BITS;
    (u64::from(shift + 1) * SUB + (ns >> shift) - SUB) as usize
}

/// The largest value of a bucket.
fn upper(bucket: usize) -> u64 {
    let bucket = bucket as u64;
    if bucket < SUB {
        return bucket;
    }
    let (shift, sub) = (bucket / SUB - 1, bucket % SUB);
    ((SUB + sub + 1) << shift).wrapping_sub(1)
}

/// A histogram in figures, ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Summary {
    /// Number of samples.
    pub count: u64,
    /// Half are at most this.
    pub p50_ns: u64,
    /// 99 of 100 are at most this.
    pub p99_ns: u64,
    /// 999 of 1000 are at most this.
    pub p999_ns: u64,
    /// Largest sample.
    pub max_ns: u64,
}

/// Adds one, while no other thread counts: no locked instruction.
#[inline]
pub(crate) fn bump(counter: &AtomicU64) {
    // Relaxed: a counter that nothing else depends on, with one writer.
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
}

impl Histogram {
    /// Adds one sample.
    pub fn record(&self, ns: u64) {
        // Relaxed: a counter that nothing else depends on.
        self.buckets[bucket(ns)].fetch_add(1, Ordering::Relaxed);
    }

    /// As [`Histogram::record`], while no other thread records: no locked instruction.
    #[inline]
    pub(crate) fn record_alone(&self, ns: u64) {
        bump(&self.buckets[bucket(ns)]);
    }

    /// The figures so far; each is the upper end of its bucket.
    pub fn summary(&self) -> Summary {
        Histogram::summary_of([self])
    }

    /// The figures of several together.
    pub(crate) fn summary_of<'h>(histograms: impl IntoIterator<Item = &'h Histogram>) -> Summary {
        let mut counts = vec![0; BUCKETS];
        for histogram in histograms {
            for (count, bucket) in counts.iter_mut().zip(&histogram.buckets) {
                // Relaxed: as for `record`.
                *count += bucket.load(Ordering::Relaxed);
            }
        }
        let count: u64 = counts.iter().sum();
        let at = |part: f64| {
            let wanted = ((count as f64 * part).ceil() as u64).clamp(1, count.max(1));
            let mut seen = 0;
            let found = counts.iter().position(|c| {
                seen += c;
                seen >= wanted
            });
            found.map_or(0, upper)
        };
        if count == 0 {
            return Summary::default();
        }
        Summary { count, p50_ns: at(0.5), p99_ns: at(0.99), p999_ns: at(0.999), max_ns: at(1.0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_is_in_a_bucket_that_ends_close_above_it() {
        let values = (0..64).flat_map(|p| [1u64 << p, (1 << p) + (1 << p) / 3, u64::MAX >> p]);
        for ns in values.chain(0..1000) {
            let end = upper(bucket(ns));
            assert!(end >= ns && end - ns <= ns / 16, "{ns} in a bucket up to {end}");
        }
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn figures_are_those_of_the_values() {
        let histogram = Histogram::default();
        assert_eq!(histogram.summary(), Summary::default());
        for ns in 1..=1000 {
            histogram.record(ns);
        }
        let summary = histogram.summary();
        assert_eq!(summary.count, 1000);
        for (got, want) in
            [(summary.p50_ns, 500), (summary.p99_ns, 990), (summary.p999_ns, 999), (summary.max_ns, 1000)]
        {
            assert!(got >= want && got <= want + want / 16, "{got} for {want}");
        }
    }
}
