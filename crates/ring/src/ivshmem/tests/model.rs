//! Both ends against a simple model, over random operations.

use std::collections::VecDeque;
use std::vec::Vec;

use proptest::prelude::*;

use super::super::net::initialise;
use super::link;

#[derive(Clone, Debug)]
enum Op {
    Send(u16),
    Publish,
    Receive { max: usize, back: usize },
    Release(usize),
    Reclaim,
    Arm,
    Unpush,
    Restart,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => prop_oneof![1u16..100, 1u16..1600, 1u16..6000].prop_map(Op::Send),
        4 => Just(Op::Publish),
        5 => (0usize..40, 0usize..4).prop_map(|(max, back)| Op::Receive { max, back }),
        5 => (0usize..40).prop_map(Op::Release),
        4 => Just(Op::Reclaim),
        2 => Just(Op::Arm),
        1 => Just(Op::Unpush),
        1 => Just(Op::Restart),
    ]
}

/// One direction as the model knows it.
#[derive(Default)]
struct Model {
    pushed: VecDeque<Vec<u8>>,
    published: VecDeque<Vec<u8>>,
    held: VecDeque<Vec<u8>>,
    returned: usize,
}

impl Model {
    fn out(&self) -> usize {
        self.pushed.len() + self.published.len() + self.held.len() + self.returned
    }
}

fn run_model(ops: Vec<(Op, bool)>, pages: usize) {
    let (geometry, a, b) = link(pages * 4096);
    let mut ends = [a, b];
    // Index i: frames from end i.
    let mut models = [Model::default(), Model::default()];
    let mut stamp = 0u32;
    for (op, second) in ops {
        let (me, other) = (usize::from(second), usize::from(!second));
        match op {
            Op::Send(len) => {
                stamp += 1;
                let bytes: Vec<u8> = (0..u32::from(len)).map(|i| (i.wrapping_mul(stamp) >> 3) as u8).collect();
                let sent = ends[me].send(&bytes);
                // Where the model cannot say without doing the same sums: a small frame in a
                // section that is half empty fits.
                let half = ends[me].sender.taken_bytes() <= geometry.data_bytes() / 2;
                let few = models[me].out() < ends[me].sender.depth();
                assert!(sent || !(half && few && u32::from(len) < geometry.data_bytes() / 8));
                assert!(!sent || few);
                if sent {
                    models[me].pushed.push_back(bytes);
                }
            }
            Op::Publish => {
                ends[me].sender.publish(&ends[me].sections);
                let mut pushed = std::mem::take(&mut models[me].pushed);
                models[me].published.append(&mut pushed);
            }
            Op::Receive { max, back } => {
                let got = ends[me].receive(max).unwrap();
                let model = &mut models[other];
                assert_eq!(got.len(), max.min(model.published.len()));
                for bytes in got {
                    let want = model.published.pop_front().unwrap();
                    assert!(bytes == want, "{} bytes differ", bytes.len());
                    model.held.push_back(want);
                }
                let back = back.min(model.held.len());
                ends[me].receiver.unreceive(back);
                for _ in 0..back {
                    let frame = model.held.pop_back().unwrap();
                    model.published.push_front(frame);
                }
            }
            Op::Release(count) => {
                ends[me].receiver.release(&ends[me].sections, count);
                let model = &mut models[other];
                let count = count.min(model.held.len());
                model.held.drain(..count);
                model.returned += count;
            }
            Op::Reclaim => {
                let end = &mut ends[me];
                assert_eq!(end.sender.reclaim(&end.sections), Ok(std::mem::take(&mut models[me].returned)));
            }
            Op::Arm => {
                let end = &mut ends[me];
                assert_eq!(end.receiver.arm(&end.sections), Ok(!models[other].published.is_empty()));
                assert_eq!(end.sender.arm(&end.sections), Ok(models[me].returned != 0));
                models[me].returned = 0;
            }
            Op::Unpush => assert_eq!(ends[me].sender.unpush(), models[me].pushed.pop_back().is_some()),
            Op::Restart => {
                for end in &mut ends {
                    initialise(&geometry, end.own);
                    end.sender.restart();
                    end.receiver.restart();
                }
                models = [Model::default(), Model::default()];
            }
        }
        for (i, model) in models.iter().enumerate() {
            assert_eq!(ends[i].sender.outstanding(), model.out());
            assert_eq!(ends[1 - i].receiver.held(), model.held.len());
            assert!(ends[i].sender.taken_bytes() <= geometry.data_bytes());
            assert!(model.out() != 0 || ends[i].sender.taken_bytes() == 0);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn both_ends_agree_with_a_dull_model(ops in prop::collection::vec((op(), any::<bool>()), 1..400), pages in 1usize..9) {
        run_model(ops, pages);
    }
}
