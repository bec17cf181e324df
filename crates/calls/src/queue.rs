//! The queue of a service: ordered by rank, which is the absolute deadline where the earliest comes
//! first, FIFO among equals; and the question whether one more request can be met.
//!
//! A B+ tree ordered by (rank, arrival): leaves hold the keys and the handles of requests, inner
//! nodes the first key below each of their children. A slot also knows, of what is below it, the
//! work in it and the least *slack*: how much later than now the processor may begin that work and
//! still meet each of its deadlines, worked off in order. Both are sums and minima over the slots
//! of a node, so insertion, removal, taking the first and the admission question all cost O(log n):
//! ten thousand pending are three levels, and what is touched is in a few nodes whose lines lie
//! side by side. (`crates/rpc/examples/rpc_bench.rs` compares it with a binary heap and a BTreeMap,
//! which cannot be asked for admission.)
//!
//! Invariants: keys ascend, within nodes and over them; no node but an empty root is empty; an
//! inner node's slot is what `Node::summary` says of its child. Two neighbours below one parent
//! that would fill less than half a node are joined when one of them shrinks, so that a queue that
//! was long once does not stay sparse. Requests themselves do not move: a handle names one until it
//! is removed; then the number may be used again. Nothing is allocated but where the queue is
//! longer than ever before.
//!
//! Times are ns; work is ns of service divided by the number of workers. Slack is held in 63 bits:
//! a deadline later than 2^62 ns (146 years) has no bound.

use alloc::vec;
use alloc::vec::Vec;

/// Names a queued request.
pub type Handle = u32;

/// Slots of a node. Half of them are moved for an insertion or a removal, all are read for a
/// summary: more make that dearer, fewer the way down longer. 16 and 64 measured slower at ten
/// thousand pending.
const FANOUT: usize = 32;
/// The slack of what has no deadline. Subtracting work from it leaves it larger than any real one.
const FREE: i64 = i64::MAX / 2;

/// Orders requests: rank, then arrival. Arrivals are unique.
type Key = (u64, u64);

/// A request in a leaf, or all that is below a child.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct NodeSlot {
    /// The first one's.
    key: Key,
    work: i64,
    /// Least slack in it.
    slack: i64,
    /// The handle, or the child's number.
    below: u32,
}

#[derive(Clone, Debug)]
struct Node {
    len: usize,
    slots: [NodeSlot; FANOUT],
}

impl Node {
    const EMPTY: Node = Node { len: 0, slots: [NodeSlot { key: (0, 0), work: 0, slack: 0, below: 0 }; FANOUT] };

    fn slots(&self) -> &[NodeSlot] {
        &self.slots[..self.len]
    }

    /// Which child holds a key, if any does: the last that begins at it or before.
    fn covers(&self, key: Key) -> usize {
        self.slots().partition_point(|slot| slot.key <= key).saturating_sub(1)
    }

    fn insert(&mut self, at: usize, slot: NodeSlot) {
        self.slots.copy_within(at..self.len, at + 1);
        self.slots[at] = slot;
        self.len += 1;
    }

    fn remove(&mut self, at: usize) {
        self.slots.copy_within(at + 1..self.len, at);
        self.len -= 1;
    }

    fn append(&mut self, slots: &[NodeSlot]) {
        self.slots[self.len..self.len + slots.len()].copy_from_slice(slots);
        self.len += slots.len();
    }

    /// All of the node as one slot of its parent's. The node has slots.
    fn summary(&self, below: u32, judges: bool) -> NodeSlot {
        let (mut work, mut slack) = (0i64, FREE);
        if judges {
            for slot in self.slots() {
                slack = slack.min(slot.slack.saturating_sub(work));
                work = work.saturating_add(slot.work);
            }
        }
        NodeSlot { key: self.slots[0].key, work, slack, below }
    }
}

fn signed(ns: u64) -> i64 {
    i64::try_from(ns).unwrap_or(i64::MAX)
}

fn bound(deadline: u64) -> i64 {
    signed(deadline).min(FREE)
}

#[derive(Debug)]
struct Request<T> {
    key: Key,
    deadline: u64,
    work: i64,
    item: T,
}

impl<T> Request<T> {
    fn slot(&self, handle: Handle) -> NodeSlot {
        let slack = bound(self.deadline).saturating_sub(self.work);
        NodeSlot { key: self.key, work: self.work, slack, below: handle }
    }
}

/// Waiting requests, ordered by deadline, with the work ahead of each.
#[derive(Debug)]
pub struct Queue<T> {
    judges: bool,
    requests: Vec<Option<Request<T>>>,
    free: Vec<Handle>,
    nodes: Vec<Node>,
    free_nodes: Vec<u32>,
    root: u32,
    /// Levels of inner nodes above the leaves.
    height: u32,
    len: usize,
    arrivals: u64,
}

impl<T> Queue<T> {
    /// An empty queue. `judges`: whether [`Queue::admits`] will be asked; what it needs is not kept
    /// where it will not.
    pub fn new(judges: bool) -> Queue<T> {
        Queue {
            judges,
            requests: Vec::new(),
            free: Vec::new(),
            nodes: vec![Node::EMPTY],
            free_nodes: Vec::new(),
            root: 0,
            height: 0,
            len: 0,
            arrivals: 0,
        }
    }

    /// How many requests wait.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn node(&self, at: u32) -> &Node {
        &self.nodes[at as usize]
    }

    fn node_mut(&mut self, at: u32) -> &mut Node {
        &mut self.nodes[at as usize]
    }

    fn summary(&self, at: u32) -> NodeSlot {
        self.node(at).summary(at, self.judges)
    }

    fn new_node(&mut self) -> u32 {
        self.free_nodes.pop().unwrap_or_else(|| {
            self.nodes.push(Node::EMPTY);
            // Fewer than requests, which are bounded far below 2^32.
            (self.nodes.len() - 1) as u32
        })
    }

    fn drop_node(&mut self, at: u32) {
        self.node_mut(at).len = 0;
        self.free_nodes.push(at);
    }

    /// Updates in a node what is below one of its slots.
    fn refresh(&mut self, at: u32, index: usize) {
        let child = self.node(at).slots[index].below;
        self.node_mut(at).slots[index] = self.summary(child);
    }

    /// Puts a slot into a node. Where that is full it is split: the slot of the new node, which
    /// comes after it, is returned.
    fn put(&mut self, at: u32, index: usize, slot: NodeSlot) -> Option<NodeSlot> {
        if self.node(at).len < FANOUT {
            self.node_mut(at).insert(index, slot);
            return None;
        }
        let new = self.new_node();
        // What comes in ascending order, as the best effort does, leaves full nodes behind.
        let keep = if index == FANOUT { FANOUT } else { FANOUT / 2 };
        let old = self.node_mut(at);
        let moved = old.slots;
        old.len = keep;
        self.node_mut(new).append(&moved[keep..]);
        if index <= keep && keep < FANOUT {
            self.node_mut(at).insert(index, slot);
        } else {
            self.node_mut(new).insert(index - keep, slot);
        }
        Some(self.summary(new))
    }

    /// Inserts below a node of that height; returns the slot of the node that it was split into,
    /// where it was.
    fn insert_below(&mut self, at: u32, height: u32, slot: NodeSlot) -> Option<NodeSlot> {
        if height == 0 {
            let index = self.node(at).slots().partition_point(|s| s.key < slot.key);
            return self.put(at, index, slot);
        }
        let index = self.node(at).covers(slot.key);
        let split = self.insert_below(self.node(at).slots[index].below, height - 1, slot);
        self.refresh(at, index);
        split.and_then(|sibling| self.put(at, index + 1, sibling))
    }

    /// Removes `key`, which must be in the tree.
    fn remove_below(&mut self, at: u32, height: u32, key: Key) {
        let index = self.node(at).covers(key);
        if height == 0 {
            debug_assert_eq!(self.node(at).slots[index].key, key);
            return self.node_mut(at).remove(index);
        }
        let child = self.node(at).slots[index].below;
        self.remove_below(child, height - 1, key);
        match self.node(child).len {
            0 => {
                self.drop_node(child);
                self.node_mut(at).remove(index);
            }
            len => {
                self.refresh(at, index);
                if len < FANOUT / 2 {
                    self.join(at, if index + 1 < self.node(at).len { index } else { index.saturating_sub(1) });
                }
            }
        }
    }

    /// Makes one of two neighbouring children where they would fill less than half a node.
    fn join(&mut self, at: u32, index: usize) {
        let [left, right] = match &self.node(at).slots()[index..] {
            [left, right, ..] => [left.below, right.below],
            _ => return,
        };
        if self.node(left).len + self.node(right).len < FANOUT / 2 {
            let moved = self.node(right).clone();
            self.node_mut(left).append(moved.slots());
            self.drop_node(right);
            self.node_mut(at).remove(index + 1);
            self.refresh(at, index);
        }
    }

    fn attach(&mut self, slot: NodeSlot) {
        if let Some(sibling) = self.insert_below(self.root, self.height, slot) {
            let old = self.summary(self.root);
            let new = self.new_node();
            self.node_mut(new).append(&[old, sibling]);
            self.root = new;
            self.height += 1;
        }
    }

    fn detach(&mut self, key: Key) {
        self.remove_below(self.root, self.height, key);
        while self.height > 0 && self.node(self.root).len == 1 {
            let only = self.node(self.root).slots[0].below;
            self.drop_node(self.root);
            self.root = only;
            self.height -= 1;
        }
    }

    /// Adds a request with its rank, its deadline (`u64::MAX`: none), and the work it brings.
    pub fn insert(&mut self, rank: u64, deadline: u64, work: u64, item: T) -> Handle {
        let request = Request { key: (rank, self.arrivals), deadline, work: signed(work), item };
        self.arrivals += 1;
        self.len += 1;
        let handle = self.free.pop().unwrap_or_else(|| {
            self.requests.push(None);
            // Bounded by its user far below 2^32 - 1.
            (self.requests.len() - 1) as u32
        });
        self.attach(request.slot(handle));
        self.requests[handle as usize] = Some(request);
        handle
    }

    /// The request that is served next.
    pub fn first(&self) -> Option<Handle> {
        let mut at = self.root;
        for _ in 0..self.height {
            at = self.node(at).slots[0].below;
        }
        self.node(at).slots().first().map(|slot| slot.below)
    }

    /// The queued request of that handle.
    pub fn get(&self, handle: Handle) -> Option<&T> {
        self.requests.get(handle as usize)?.as_ref().map(|request| &request.item)
    }

    /// The same, to be changed; it stays where it is in the order.
    pub fn get_mut(&mut self, handle: Handle) -> Option<&mut T> {
        self.requests.get_mut(handle as usize)?.as_mut().map(|request| &mut request.item)
    }

    /// Takes a request out.
    pub fn remove(&mut self, handle: Handle) -> Option<T> {
        self.remove_with_work(handle).map(|(item, _)| item)
    }

    /// The same, with the work that it was put in with.
    pub fn remove_with_work(&mut self, handle: Handle) -> Option<(T, u64)> {
        let request = self.requests.get_mut(handle as usize)?.take()?;
        self.detach(request.key);
        self.free.push(handle);
        self.len -= 1;
        Some((request.item, request.work.unsigned_abs()))
    }

    /// Where a queued request is in the order: its rank, and how many had come before it.
    pub fn key(&self, handle: Handle) -> Option<(u64, u64)> {
        self.requests.get(handle as usize)?.as_ref().map(|request| request.key)
    }

    /// Puts a queued request, without a deadline from now on, elsewhere in the order; it keeps its
    /// handle, and its place among equals by arrival.
    pub fn postpone(&mut self, handle: Handle, rank: u64) {
        let Some(Some(request)) = self.requests.get_mut(handle as usize) else { return };
        let old = request.key;
        (request.key.0, request.deadline) = (rank, u64::MAX);
        let slot = request.slot(handle);
        self.detach(old);
        self.attach(slot);
    }

    /// Whether a request with that rank, deadline and work would be done in time, and all others
    /// that are in time now would still be, if the work on the queue begins at `start` and goes on
    /// in order. Only for a queue that was made to judge.
    pub fn admits(&self, start: u64, rank: u64, deadline: u64, work: u64) -> bool {
        let work = signed(work);
        // Work ahead of it; least slack of those behind it, from the beginning of all.
        let (mut ahead, mut behind) = (0i64, FREE);
        let mut at = self.root;
        for level in (0..=self.height).rev() {
            let slots = self.node(at).slots();
            let after = slots.partition_point(|slot| slot.key.0 <= rank);
            // Of an inner node's children the last that begins no later may have both.
            let inside = if level == 0 { after } else { after.saturating_sub(1) };
            ahead = slots[..inside].iter().fold(ahead, |sum, slot| sum.saturating_add(slot.work));
            let mut through = slots[inside..after].iter().fold(ahead, |sum, slot| sum.saturating_add(slot.work));
            for slot in &slots[after..] {
                behind = behind.min(slot.slack.saturating_sub(through));
                through = through.saturating_add(slot.work);
            }
            match slots.get(inside) {
                Some(slot) if level > 0 && inside < after => at = slot.below,
                _ => break,
            }
        }
        let start = bound(start);
        let own = bound(deadline).saturating_sub(ahead.saturating_add(work));
        (deadline == u64::MAX || own >= start) && (behind >= FREE / 2 || behind.saturating_sub(work) >= start)
    }

    /// Handles of all requests, in no order.
    pub fn handles(&self) -> impl Iterator<Item = Handle> {
        self.requests.iter().enumerate().filter(|(_, request)| request.is_some()).map(|(at, _)| at as Handle)
    }

    /// Takes all out, in order.
    pub fn drain(&mut self) -> Vec<T> {
        let mut out = Vec::with_capacity(self.len);
        while let Some(handle) = self.first() {
            out.extend(self.remove(handle));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn earliest_first_fifo_among_equals_best_effort_last() {
        let mut queue = Queue::new(true);
        for (deadline, name) in [(u64::MAX, "b1"), (20, "c"), (10, "a"), (20, "d"), (u64::MAX, "b2"), (0, "z")] {
            queue.insert(deadline, deadline, 1, name);
        }
        assert_eq!(queue.drain(), ["z", "a", "c", "d", "b1", "b2"]);
        assert!(queue.is_empty());
    }

    #[test]
    fn a_handle_is_good_until_its_request_leaves() {
        let mut queue = Queue::new(true);
        let (a, b) = (queue.insert(5, 5, 1, 'a'), queue.insert(3, 3, 1, 'b'));
        assert_eq!(queue.remove(a), Some('a'));
        assert_eq!((queue.remove(a), queue.get(b)), (None, Some(&'b')));
        assert_eq!(queue.remove(99), None);
    }

    #[test]
    fn admission_looks_at_what_is_ahead_and_at_what_is_behind() {
        let mut queue = Queue::new(true);
        queue.insert(100, 100, 40, ());
        queue.insert(200, 200, 40, ());
        // From 0: done at 40 and 80.
        assert!(queue.admits(0, 120, 120, 80 - 1), "80 + 79 <= 200, 40 + 79 <= 120");
        assert!(!queue.admits(0, 120, 120, 81), "would be done at 121");
        assert!(queue.admits(0, 50, 50, 50), "first, done at 50; the others at 90 and 130");
        assert!(!queue.admits(0, 90, 90, 70), "the first one would be done at 110");
        assert!(queue.admits(0, u64::MAX, u64::MAX, 1 << 40), "best effort is behind all of them");
        assert!(!queue.admits(299, 300, 300, 1), "80 of work are ahead");
    }

    /// The dull one: a list that is sorted by its key, with (deadline, work) of each.
    type List = Vec<(Key, u64, u64)>;

    fn admits(list: &List, start: u64, rank: u64, deadline: u64, work: u64) -> bool {
        let mut all: Vec<(Key, u64, u64, bool)> = list.iter().map(|(k, d, w)| (*k, *d, *w, false)).collect();
        all.push(((rank, u64::MAX), deadline, work, true));
        all.sort();
        let mut time = start;
        let mut behind = false;
        all.into_iter().all(|(_, deadline, work, new)| {
            time += work;
            behind |= new;
            // What is ahead of the new one is not made worse by it.
            !behind || deadline == u64::MAX || time <= deadline
        })
    }

    /// Checks the invariants, and returns the requests in order.
    fn check<T>(queue: &Queue<T>) -> Vec<Key> {
        fn walk<T>(queue: &Queue<T>, at: u32, height: u32, out: &mut Vec<Key>) -> usize {
            let node = queue.node(at);
            if height == 0 {
                for slot in node.slots() {
                    assert_eq!(queue.requests[slot.below as usize].as_ref().unwrap().slot(slot.below), *slot);
                    out.push(slot.key);
                }
                return 1;
            }
            assert!(node.len > 0);
            let below = node.slots().iter().map(|slot| {
                assert_eq!(queue.summary(slot.below), *slot);
                walk(queue, slot.below, height - 1, out)
            });
            1 + below.sum::<usize>()
        }
        let mut keys = Vec::new();
        let used = walk(queue, queue.root, queue.height, &mut keys);
        assert!(keys.is_sorted() && keys.len() == queue.len());
        assert_eq!(used + queue.free_nodes.len(), queue.nodes.len(), "nodes are in use or free");
        keys
    }

    proptest! {
        #[test]
        fn it_is_a_sorted_list(
            steps in prop::collection::vec((0u8..8, 0u64..60, 0u64..60, 1u64..9, any::<prop::sample::Index>()), 1..600),
            shrinks in any::<bool>(),
            by_deadline in any::<bool>(),
        ) {
            let mut queue = Queue::new(true);
            let mut list: List = Vec::new();
            let mut handles = Vec::new();
            let steps_len = steps.len();
            for (n, (kind, rank, deadline, work, which)) in steps.into_iter().enumerate() {
                // Grows over some levels, then shrinks.
                let kind = if shrinks && n > steps_len / 2 && kind < 4 { 4 } else { kind };
                let n = n as u64;
                let deadline = if deadline > 55 { u64::MAX } else { deadline };
                let rank = if by_deadline { deadline } else { rank };
                match kind {
                    0..4 => {
                        let key = (rank, queue.arrivals);
                        handles.push((queue.insert(rank, deadline, work, n), key));
                        list.push((key, deadline, work));
                        list.sort();
                    }
                    4 if !handles.is_empty() => {
                        let (handle, key) = handles.swap_remove(which.index(handles.len()));
                        prop_assert!(queue.remove(handle).is_some());
                        list.retain(|k| k.0 != key);
                    }
                    5 if !handles.is_empty() => {
                        let at = which.index(handles.len());
                        let (handle, key) = &mut handles[at];
                        queue.postpone(*handle, rank);
                        let entry = list.iter_mut().find(|k| k.0 == *key).unwrap();
                        (entry.0.0, entry.1) = (rank, u64::MAX);
                        *key = entry.0;
                        list.sort();
                    }
                    _ => prop_assert_eq!(
                        queue.admits(n % 50, rank, deadline, work),
                        admits(&list, n % 50, rank, deadline, work)
                    ),
                }
                prop_assert_eq!(queue.len(), list.len());
                prop_assert_eq!(check(&queue), list.iter().map(|k| k.0).collect::<Vec<_>>());
                let first = queue.first().map(|handle| queue.requests[handle as usize].as_ref().unwrap().key);
                prop_assert_eq!(first, list.first().map(|k| k.0));
            }
        }
    }

    #[test]
    fn ten_thousand_in_any_order_are_shallow_and_come_back() {
        let orders: [fn(u64) -> u64; 3] = [|n| n, |n| 10_000 - n, |n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)];
        for (order, judges) in orders.into_iter().flat_map(|order| [(order, true), (order, false)]) {
            let mut queue = Queue::new(judges);
            let mut handles: Vec<Handle> = (0..10_000).map(|n| queue.insert(order(n), order(n), 1, ())).collect();
            check(&queue);
            assert!(queue.height <= 3, "{}", queue.height);
            // All but one in a hundred are cancelled, all over the queue: the rest does not keep
            // the others' nodes.
            let kept = handles.iter().copied().step_by(100).collect::<Vec<_>>();
            handles.retain(|h| !kept.contains(h));
            handles.into_iter().for_each(|h| assert!(queue.remove(h).is_some()));
            check(&queue);
            assert!(queue.nodes.len() - queue.free_nodes.len() < 40, "{} nodes", queue.nodes.len());
            assert_eq!(queue.drain().len(), 100);
            assert_eq!((queue.height, check(&queue).len()), (0, 0));
        }
    }
}
