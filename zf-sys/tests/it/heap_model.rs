//! A heap against a model of it: random allocations, frees and peak resets.

use proptest::prelude::*;
use tch::{Device, Kind, Tensor};
use zf_sys::heap::{ByCategory, Category, Heap, tag};

#[derive(Clone, Debug)]
enum Action {
    Allocate(usize, i64),
    Free(usize),
    ResetPeak,
}

fn action() -> impl Strategy<Value = Action> {
    let size = prop_oneof![0_i64..5000, (1_i64 << 20)..(3 << 20)];
    prop_oneof![
        4 => (0_usize..6, size).prop_map(|(category, bytes)| Action::Allocate(category, bytes)),
        3 => any::<usize>().prop_map(Action::Free),
        1 => Just(Action::ResetPeak),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn agrees_with_a_simple_model(actions in proptest::collection::vec(action(), 1..60)) {
        let heap = Heap::new("model").unwrap();
        let _inside = heap.enter();
        let mut blocks: Vec<(usize, i64, Tensor)> = Vec::new();
        let (mut live, mut peak, mut at_peak, mut high) = (ByCategory::default(), 0, ByCategory::default(), 0);
        for action in actions {
            match action {
                Action::Allocate(category, bytes) => {
                    let _tag = tag(Category::ALL[category]);
                    let tensor = Tensor::f_empty([bytes], (Kind::Uint8, Device::Cpu)).unwrap();
                    live.0[category] += bytes;
                    blocks.push((category, bytes, tensor));
                }
                Action::Free(which) if !blocks.is_empty() => {
                    let (category, bytes, _) = blocks.swap_remove(which % blocks.len());
                    live.0[category] -= bytes;
                }
                Action::Free(_) => {}
                Action::ResetPeak => {
                    heap.reset_peak();
                    (peak, at_peak) = (live.total(), live);
                }
            }
            if peak < live.total() {
                (peak, at_peak) = (live.total(), live);
            }
            high = high.max(peak);
            let stats = heap.stats();
            prop_assert_eq!(stats.live, live);
            prop_assert_eq!((stats.peak, stats.at_peak), (peak, at_peak));
            prop_assert!(stats.cached >= 0 && stats.live.total() + stats.cached <= high);
        }
        drop(blocks);
        prop_assert_eq!(heap.stats().live, ByCategory::default());
    }
}
