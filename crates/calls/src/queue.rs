//! The queue of a service: earliest absolute deadline first, FIFO among equals, and the question whether one more request
//! can be met.
//!
//! A balanced tree (a treap) ordered by (deadline, arrival). Each node also knows, of its subtree, the work in it and the
//! least *slack*: how much later than now the processor may begin this subtree's work and still meet each of its deadlines,
//! worked off in order. Both are sums and minima of what the two halves know, so insertion, removal, taking the first and the
//! admission question all cost O(log n), at ten thousand pending as at ten.
//!
//! Invariants: a node's priority is not below its children's; `work` and `slack` are those of the subtree. The shape depends on
//! the seed, the order never does. A handle names a request until it is removed; then the number may be used again.
//!
//! Times are ns; work is ns of service divided by the number of workers. Slack is held in 63 bits: a deadline later than
//! 2^62 ns (146 years) has no bound.

use alloc::vec::Vec;

/// Names a queued request.
pub type Handle = u32;

const NONE: u32 = u32::MAX;
/// The slack of what has no deadline. Subtracting work from it leaves it larger than any real one.
const FREE: i64 = i64::MAX / 2;

#[derive(Debug)]
struct Node {
    deadline: u64,
    arrival: u64,
    priority: u32,
    left: u32,
    right: u32,
    work: u64,
    /// Work in the subtree.
    sum: u64,
    /// Least slack in the subtree.
    slack: i64,
}

fn bound(deadline: u64) -> i64 {
    i64::try_from(deadline).unwrap_or(FREE).min(FREE)
}

fn less(slack: i64, work: u64) -> i64 {
    slack.saturating_sub(i64::try_from(work).unwrap_or(i64::MAX))
}

/// The queue.
#[derive(Debug)]
pub struct Queue<T> {
    nodes: Vec<Node>,
    items: Vec<Option<T>>,
    free: Vec<u32>,
    root: u32,
    len: usize,
    arrivals: u64,
    random: u64,
}

impl<T> Queue<T> {
    /// An empty queue. `seed` shapes the tree: whoever chooses deadlines must not know it.
    pub fn new(seed: u64) -> Queue<T> {
        Queue {
            nodes: Vec::new(),
            items: Vec::new(),
            free: Vec::new(),
            root: NONE,
            len: 0,
            arrivals: 0,
            random: seed | 1,
        }
    }

    /// Requests in it.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Work of all that is in it, ns.
    pub fn work(&self) -> u64 {
        self.sum(self.root)
    }

    fn next_random(&mut self) -> u32 {
        // xorshift64*: fast, and good enough for a tree's balance.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        (self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32
    }

    fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    fn node_mut(&mut self, at: u32) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    fn sum(&self, at: u32) -> u64 {
        if at == NONE { 0 } else { self.node(at).sum }
    }

    fn slack(&self, at: u32) -> i64 {
        if at == NONE { FREE } else { self.node(at).slack }
    }

    fn update(&mut self, at: u32) {
        let Node { deadline, left, right, work, .. } = *self.node(at);
        let before = self.sum(left).saturating_add(work);
        let own = less(bound(deadline), before);
        let slack = self.slack(left).min(own).min(less(self.slack(right), before));
        let sum = before.saturating_add(self.sum(right));
        let node = self.node_mut(at);
        (node.sum, node.slack) = (sum, slack);
    }

    fn key(&self, at: u32) -> (u64, u64) {
        let node = self.node(at);
        (node.deadline, node.arrival)
    }

    /// Splits the subtree into what is before `key` and the rest.
    fn split(&mut self, at: u32, key: (u64, u64)) -> (u32, u32) {
        if at == NONE {
            return (NONE, NONE);
        }
        if self.key(at) < key {
            let (low, high) = self.split(self.node(at).right, key);
            self.node_mut(at).right = low;
            self.update(at);
            (at, high)
        } else {
            let (low, high) = self.split(self.node(at).left, key);
            self.node_mut(at).left = high;
            self.update(at);
            (low, at)
        }
    }

    /// Joins two subtrees, all of the first before all of the second.
    fn join(&mut self, a: u32, b: u32) -> u32 {
        if a == NONE || b == NONE {
            return if a == NONE { b } else { a };
        }
        if self.node(a).priority >= self.node(b).priority {
            let right = self.join(self.node(a).right, b);
            self.node_mut(a).right = right;
            self.update(a);
            a
        } else {
            let left = self.join(a, self.node(b).left);
            self.node_mut(b).left = left;
            self.update(b);
            b
        }
    }

    fn attach_below(&mut self, at: u32, new: u32) -> u32 {
        if at == NONE {
            return new;
        }
        let key = self.key(new);
        if self.node(at).priority < self.node(new).priority {
            let (low, high) = self.split(at, key);
            let node = self.node_mut(new);
            (node.left, node.right) = (low, high);
            self.update(new);
            return new;
        }
        if self.key(at) < key {
            let right = self.attach_below(self.node(at).right, new);
            self.node_mut(at).right = right;
        } else {
            let left = self.attach_below(self.node(at).left, new);
            self.node_mut(at).left = left;
        }
        self.update(at);
        at
    }

    fn detach_below(&mut self, at: u32, key: (u64, u64)) -> u32 {
        if at == NONE {
            return NONE;
        }
        let here = self.key(at);
        if here == key {
            let (left, right) = (self.node(at).left, self.node(at).right);
            return self.join(left, right);
        }
        if here < key {
            let right = self.detach_below(self.node(at).right, key);
            self.node_mut(at).right = right;
        } else {
            let left = self.detach_below(self.node(at).left, key);
            self.node_mut(at).left = left;
        }
        self.update(at);
        at
    }

    fn attach(&mut self, at: u32) {
        let node = self.node_mut(at);
        (node.left, node.right) = (NONE, NONE);
        self.update(at);
        self.root = self.attach_below(self.root, at);
    }

    /// Adds a request with its deadline (`u64::MAX`: best effort, after all others) and the work it brings.
    pub fn insert(&mut self, deadline: u64, work: u64, item: T) -> Handle {
        let (arrival, priority) = (self.arrivals, self.next_random());
        self.arrivals += 1;
        let node = Node { deadline, arrival, priority, left: NONE, right: NONE, work, sum: 0, slack: 0 };
        let at = match self.free.pop() {
            Some(at) => {
                *self.node_mut(at) = node;
                self.items[at as usize] = Some(item);
                at
            }
            None => {
                self.nodes.push(node);
                self.items.push(Some(item));
                // Bounded by its user far below 2^32 - 1.
                (self.nodes.len() - 1) as u32
            }
        };
        self.len += 1;
        self.attach(at);
        at
    }

    /// The first request: its handle, and its deadline.
    pub fn first(&self) -> Option<(Handle, u64)> {
        if self.root == NONE {
            return None;
        }
        let mut at = self.root;
        while self.node(at).left != NONE {
            at = self.node(at).left;
        }
        Some((at, self.node(at).deadline))
    }

    /// The queued request of that handle.
    pub fn get(&self, handle: Handle) -> Option<&T> {
        self.items.get(handle as usize)?.as_ref()
    }

    /// Takes a request out.
    pub fn remove(&mut self, handle: Handle) -> Option<T> {
        let item = self.items.get_mut(handle as usize)?.take()?;
        self.root = self.detach_below(self.root, self.key(handle));
        self.free.push(handle);
        self.len -= 1;
        Some(item)
    }

    /// Gives a queued request another deadline; it keeps its handle, and its place among equals by arrival.
    pub fn change(&mut self, handle: Handle, deadline: u64) {
        if self.get(handle).is_some() {
            self.root = self.detach_below(self.root, self.key(handle));
            self.node_mut(handle).deadline = deadline;
            self.attach(handle);
        }
    }

    /// Whether a request with that deadline and work would be done in time, and all others that are in time now would still
    /// be, if the work on the queue begins at `start` and goes on in order.
    pub fn admits(&self, start: u64, deadline: u64, work: u64) -> bool {
        let (mut at, mut before, mut later) = (self.root, 0u64, FREE);
        while at != NONE {
            let node = self.node(at);
            let through = before.saturating_add(self.sum(node.left)).saturating_add(node.work);
            if node.deadline > deadline {
                later = later.min(less(bound(node.deadline), through)).min(less(self.slack(node.right), through));
                at = node.left;
            } else {
                before = through;
                at = node.right;
            }
        }
        let start = bound(start);
        let own = less(bound(deadline), before.saturating_add(work));
        (deadline == u64::MAX || own >= start) && (later >= FREE / 2 || less(later, work) >= start)
    }

    /// Handles of all requests, in no order.
    pub fn handles(&self) -> impl Iterator<Item = Handle> {
        self.items.iter().enumerate().filter(|(_, item)| item.is_some()).map(|(at, _)| at as Handle)
    }

    /// Takes all out, in order.
    pub fn drain(&mut self) -> Vec<T> {
        let mut out = Vec::with_capacity(self.len);
        while let Some((handle, _)) = self.first() {
            out.extend(self.remove(handle));
        }
        out
    }
}

#[cfg(any(test, feature = "std"))]
impl<T> Default for Queue<T> {
    fn default() -> Self {
        use std::hash::{BuildHasher, Hasher};
        let seed = std::collections::hash_map::RandomState::new().build_hasher().finish();
        Queue::new(seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn earliest_first_fifo_among_equals_best_effort_last() {
        let mut queue = Queue::new(1);
        for (deadline, name) in [(u64::MAX, "b1"), (20, "c"), (10, "a"), (20, "d"), (u64::MAX, "b2"), (0, "z")] {
            queue.insert(deadline, 1, name);
        }
        assert_eq!(queue.drain(), ["z", "a", "c", "d", "b1", "b2"]);
        assert!(queue.is_empty() && queue.work() == 0);
    }

    #[test]
    fn a_handle_is_good_until_its_request_leaves() {
        let mut queue = Queue::new(1);
        let (a, b) = (queue.insert(5, 1, 'a'), queue.insert(3, 1, 'b'));
        assert_eq!(queue.remove(a), Some('a'));
        assert_eq!((queue.remove(a), queue.get(b)), (None, Some(&'b')));
        assert_eq!(queue.remove(99), None);
    }

    #[test]
    fn admission_looks_at_what_is_ahead_and_at_what_is_behind() {
        let mut queue = Queue::new(1);
        queue.insert(100, 40, ());
        queue.insert(200, 40, ());
        // From 0: done at 40 and 80.
        assert!(queue.admits(0, 120, 80 - 1), "80 + 79 <= 200, 40 + 79 <= 120");
        assert!(!queue.admits(0, 120, 81), "would be done at 121");
        assert!(queue.admits(0, 50, 50), "first, done at 50; the others at 90 and 130");
        assert!(!queue.admits(0, 90, 70), "the first one would be done at 110");
        assert!(queue.admits(0, u64::MAX, 1 << 40), "best effort is behind all of them");
        assert!(!queue.admits(299, 300, 1), "80 of work are ahead");
    }

    /// The dull one: a sorted list.
    fn admits(list: &[(u64, u64, u64)], start: u64, deadline: u64, work: u64) -> bool {
        let mut all: Vec<(u64, u64, u64, bool)> = list.iter().map(|(d, a, w)| (*d, *a, *w, false)).collect();
        all.push((deadline, u64::MAX, work, true));
        all.sort();
        let mut time = start;
        let mut behind = false;
        all.into_iter().all(|(deadline, _, work, new)| {
            time += work;
            behind |= new;
            // What is ahead of the new one is not made worse by it.
            !behind || deadline == u64::MAX || time <= deadline
        })
    }

    proptest! {
        #[test]
        fn it_is_a_sorted_list(
            seed in any::<u64>(),
            steps in prop::collection::vec((0u8..5, 0u64..60, 1u64..9, any::<prop::sample::Index>()), 1..250),
        ) {
            let mut queue = Queue::new(seed);
            let mut list: Vec<(u64, u64, u64)> = Vec::new();
            let mut handles = Vec::new();
            for (n, (kind, deadline, work, which)) in steps.into_iter().enumerate() {
                let n = n as u64;
                let deadline = if deadline > 55 { u64::MAX } else { deadline };
                match kind {
                    0 | 1 => {
                        let arrival = queue.arrivals;
                        handles.push((queue.insert(deadline, work, n), (deadline, arrival, work)));
                        list.push((deadline, arrival, work));
                        list.sort();
                    }
                    2 if !handles.is_empty() => {
                        let (handle, key) = handles.swap_remove(which.index(handles.len()));
                        prop_assert!(queue.remove(handle).is_some());
                        list.retain(|k| *k != key);
                    }
                    3 if !handles.is_empty() => {
                        let i = which.index(handles.len());
                        let (handle, old) = handles[i];
                        queue.change(handle, deadline);
                        handles[i].1 = (deadline, old.1, old.2);
                        list.retain(|k| *k != old);
                        list.push(handles[i].1);
                        list.sort();
                    }
                    _ => prop_assert_eq!(queue.admits(n % 50, deadline, work), admits(&list, n % 50, deadline, work)),
                }
                prop_assert_eq!(queue.len(), list.len());
                prop_assert_eq!(queue.work(), list.iter().map(|k| k.2).sum::<u64>());
                prop_assert_eq!(queue.first().map(|f| f.1), list.first().map(|k| k.0));
                let first = queue.first().map(|(h, _)| queue.node(h).arrival);
                prop_assert_eq!(first, list.first().map(|k| k.1));
            }
        }
    }

    #[test]
    fn ten_thousand_in_the_worst_order_stay_shallow() {
        let mut queue = Queue::new(7);
        for deadline in 0..10_000u64 {
            queue.insert(deadline, 1, ());
        }
        fn depth(queue: &Queue<()>, at: u32) -> usize {
            if at == NONE { 0 } else { 1 + depth(queue, queue.node(at).left).max(depth(queue, queue.node(at).right)) }
        }
        assert!(depth(&queue, queue.root) < 60, "{}", depth(&queue, queue.root));
    }
}
