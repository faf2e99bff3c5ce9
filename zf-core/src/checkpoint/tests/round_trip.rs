//! What was written comes back, whoever wrote it.

use proptest::prelude::*;

use super::*;

/// For each tensor of [`model`] some cuts, and the rank of each piece.
fn splits() -> impl Strategy<Value = (usize, Vec<Vec<(usize, usize)>>)> {
    (1usize..6).prop_flat_map(|world| {
        let tensor = prop::collection::vec((0usize..36, 0..world), 0..7);
        (Just(world), prop::collection::vec(tensor, model().len()))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_split_over_any_ranks((world, splits) in splits(), lows in prop::collection::vec((0usize..36, 0usize..36), 4)) {
        let folder = tempfile::tempdir().unwrap();
        let model = model();
        let mut states: Vec<RankState> =
            (0..world).map(|rank| RankState { step: 3, rank, world, pieces: Vec::new() }).collect();
        for ((name, kind, shape, values), cuts) in model.iter().zip(&splits) {
            let mut cuts: Vec<(usize, usize)> = cuts.iter().map(|&(at, rank)| (at.min(values.len()), rank)).collect();
            cuts.push((values.len(), world - 1));
            cuts.sort();
            let mut start = 0;
            for (end, rank) in cuts {
                states[rank].pieces.push(piece(name, kind, shape, start..end, values));
                start = end;
            }
        }
        // The same empty range twice on one rank has the same key; the engine never makes it.
        for state in &mut states {
            let mut seen = std::collections::BTreeSet::new();
            state.pieces.retain(|p| seen.insert((p.name.clone(), p.kind.clone(), p.range.start, p.range.end)));
        }
        save(folder.path(), &options("a"), states, &meta(3)).unwrap();
        let checkpoint = Checkpoint::open(&step_path(folder.path(), 3)).unwrap();
        checkpoint.verify().unwrap();
        assert_holds(&checkpoint, &model);
        for (a, b) in lows {
            let range = a.min(b).min(35)..a.max(b).min(35);
            let mut part = vec![0.0; range.len()];
            checkpoint.read_f32("w", MASTER, range.clone(), &mut part).unwrap();
            prop_assert_eq!(&part[..], &model[0].3[range]);
        }
        let other = tempfile::tempdir().unwrap();
        save_model(other.path(), 1, 3);
        let whole = Checkpoint::open(&step_path(other.path(), 3)).unwrap();
        prop_assert_eq!(&checkpoint.meta().state_hash, &whole.meta().state_hash);
        prop_assert_eq!(checkpoint.state_hash().unwrap(), whole.state_hash().unwrap());
    }
}

#[test]
fn more_ranks_than_elements_and_ranks_without_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let mut states: Vec<RankState> = (0..6).map(|rank| share(&model(), rank, 7, 1)).collect();
    states.push(share(&model(), 6, 7, 1));
    for state in &mut states {
        state.world = 8;
    }
    states.push(RankState { step: 1, rank: 7, world: 8, pieces: Vec::new() });
    save(folder.path(), &options("a"), states, &meta(1)).unwrap();
    let checkpoint = Checkpoint::open(&step_path(folder.path(), 1)).unwrap();
    checkpoint.verify().unwrap();
    assert_holds(&checkpoint, &model());
    assert_eq!(checkpoint.world(), 8);
    assert_eq!(checkpoint.read_tensor_f32("frozen").unwrap().1[2], 3.0);
    assert_eq!(checkpoint.read_tensor_f32("none").unwrap(), (vec![5, 0], vec![]));
}

#[test]
fn sixteen_bit_types_are_kept_and_read_as_float32() {
    let folder = tempfile::tempdir().unwrap();
    let values = [half::bf16::from_f32(1.5), half::bf16::NEG_INFINITY, half::bf16::from_bits(1)];
    let data: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let half = half::f16::from_f32(0.25).to_le_bytes().to_vec();
    let piece = |name: &str, dtype, numel: usize, data: &[u8]| Piece {
        name: name.into(),
        kind: PARAMETER.into(),
        shape: vec![numel as i64],
        dtype,
        range: 0..numel,
        data: data.to_vec(),
    };
    let pieces = vec![piece("b", DTypeName::BF16, 3, &data), piece("h", DTypeName::F16, 1, &half)];
    save(folder.path(), &options("a"), vec![RankState { step: 0, rank: 0, world: 1, pieces }], &meta(0)).unwrap();
    let checkpoint = Checkpoint::open(&step_path(folder.path(), 0)).unwrap();
    assert_eq!(checkpoint.tensor("b", PARAMETER).unwrap().dtype, DTypeName::BF16);
    assert_eq!(checkpoint.read_bytes("b", PARAMETER, 0..3).unwrap(), data);
    assert_eq!(checkpoint.read_bytes("b", PARAMETER, 1..2).unwrap(), data[2..4]);
    let expected: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
    assert_eq!(checkpoint.read_tensor_f32("b").unwrap().1, expected);
    assert_eq!(checkpoint.read_tensor_f32("h").unwrap().1, [0.25]);
}

#[test]
fn files_are_plain_safetensors() {
    let folder = tempfile::tempdir().unwrap();
    save_model(folder.path(), 2, 1);
    let path = step_path(folder.path(), 1).join("rank-00000-of-00002.safetensors");
    let bytes = std::fs::read(path).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let view = tensors.tensor("master:w[0..17]").unwrap();
    assert_eq!((view.dtype(), view.shape()), (safetensors::Dtype::F32, &[17][..]));
    assert_eq!(view.data()[..4], model()[0].3[0].to_le_bytes());
}

#[test]
fn every_number_of_the_run_comes_back() {
    let folder = tempfile::tempdir().unwrap();
    let meta = Meta {
        step: 2,
        updates: 1,
        counts: [("w".to_owned(), 1)].into(),
        loss_scale: serde_json::json!({"scale": 65536.0, "good": 3}),
        data_position: u64::MAX,
        data_identity: "d".into(),
        model_identity: "m".into(),
        seed: 9,
        run: "[run]\nsteps = 2\n".into(),
        state_hash: String::new(),
        best: Some(Best { step: 1, validation_loss: 0.1 + 0.2 }),
        versions: [("zf".to_owned(), "0.1.0".to_owned())].into(),
        random: serde_json::json!([1, 2]),
        extra: serde_json::json!({"stage": {"x": 0.1}}),
    };
    save(folder.path(), &options("a"), vec![share(&model(), 0, 1, 2)], &meta).unwrap();
    let found = Checkpoint::open(&step_path(folder.path(), 2)).unwrap().meta().clone();
    assert_eq!(found.state_hash.len(), 64);
    assert_eq!(Meta { state_hash: String::new(), ..found }, meta);
}

#[test]
fn the_hash_sees_every_bit_and_no_order() {
    let hash = |change: &dyn Fn(&mut Vec<Logical>), count: u64| {
        let mut model = model();
        change(&mut model);
        let mut hasher = StateHasher::new();
        for (name, kind, _, values) in &model {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            hasher.add(name, kind, &bytes);
        }
        hasher.add_count("w", count);
        hasher.finish()
    };
    let base = hash(&|_| {}, 1);
    assert_eq!(base, hash(&|m| m.reverse(), 1));
    assert_eq!(base, hash(&|m| m[5].3[0] = 2.0, 1), "frozen parameters are not part of it");
    let changes: [&dyn Fn(&mut Vec<Logical>); 5] = [
        &|m| m[0].3[34] = f32::from_bits(m[0].3[34].to_bits() ^ 1),
        &|m| m[2].3[0] = 0.0,
        &|m| m[1].1 = "momentum",
        &|m| m[3].0 = "nothing",
        &|m| drop(m.remove(3)),
    ];
    for (number, change) in changes.iter().enumerate() {
        assert_ne!(base, hash(change, 1), "change {number}");
    }
    assert_ne!(base, hash(&|_| {}, 2));
}
