//! Attempts, kills, keeping and deleting, writing in the background.

use std::fs;

use super::*;
use crate::Error;

fn names(root: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn state(step: u64) -> RankState {
    share(&model(), 0, 1, step)
}

/// A writer of one rank that keeps `keep`.
fn writer(root: &Path, keep: usize) -> Writer {
    Writer::new(root, 0, Options { keep, ..options("run") }).unwrap()
}

#[test]
fn a_killed_save_is_invisible_and_never_mixed_in() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    save_model(root, 2, 1);
    // Rank 1 of an earlier start wrote its part of step 2 and everything died.
    let mut lost = Writer::new(root, 1, options("first")).unwrap();
    lost.save(share(&model(), 1, 2, 2), None).unwrap();
    assert_eq!(names(root), [".step-2.first-0.partial", "step-1"]);
    assert_eq!(newest_whole(root).unwrap().unwrap().0, 1);
    // The next start saves the same step with other values; the old part stays out of it.
    let mut changed = model();
    changed[0].3[34] = 77.0;
    let states = (0..2).map(|rank| share(&changed, rank, 2, 2)).collect();
    save(root, &options("second"), states, &meta(2)).unwrap();
    assert_eq!(names(root), ["step-1", "step-2"]);
    assert_holds(&Checkpoint::open(&step_path(root, 2)).unwrap(), &changed);
}

#[test]
fn a_start_keeps_the_partial_folders_of_its_own_attempt() {
    let folder = tempfile::tempdir().unwrap();
    let mut early = Writer::new(folder.path(), 1, options("run")).unwrap();
    early.save(share(&model(), 1, 2, 5), None).unwrap();
    let mut late = Writer::new(folder.path(), 0, options("run")).unwrap();
    late.save(share(&model(), 0, 2, 5), Some(meta(5))).unwrap();
    assert_holds(&Checkpoint::open(&step_path(folder.path(), 5)).unwrap(), &model());
}

#[test]
fn half_deleted_and_half_replaced_folders() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    save_model(root, 1, 1);
    fs::create_dir(root.join(".step-0.deleted")).unwrap();
    fs::rename(root.join("step-1"), root.join(".step-1.replaced")).unwrap();
    fs::create_dir(root.join("notes")).unwrap();
    drop(writer(root, 1));
    assert_eq!(names(root), ["notes", "step-1"]);
    Checkpoint::open(&step_path(root, 1)).unwrap().verify().unwrap();
}

#[test]
fn keeps_the_newest_and_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let mut writer = writer(root, 2);
    for step in 1..=5 {
        let best = (step >= 2).then_some(Best { step: 2, validation_loss: 1.0 });
        writer.save(state(step), Some(Meta { best, ..meta(step) })).unwrap();
    }
    assert_eq!(names(root), ["step-2", "step-4", "step-5"]);
    writer.save(state(6), Some(Meta { best: Some(Best { step: 6, validation_loss: 0.5 }), ..meta(6) })).unwrap();
    assert_eq!(names(root), ["step-5", "step-6"]);
}

#[test]
fn a_step_saved_again_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = writer(folder.path(), 1);
    writer.save(state(3), Some(meta(3))).unwrap();
    let mut changed = model();
    changed[0].3[0] = 5.0;
    writer.save(share(&changed, 0, 1, 3), Some(meta(3))).unwrap();
    assert_eq!(names(folder.path()), ["step-3"]);
    assert_holds(&Checkpoint::open(&step_path(folder.path(), 3)).unwrap(), &changed);
}

#[test]
fn the_newest_whole_one_by_number() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    assert_eq!(newest_whole(root).unwrap(), None);
    assert_eq!(newest_whole(&root.join("missing")).unwrap(), None);
    for step in [9, 10, 100] {
        save_model(root, 1, step);
    }
    fs::create_dir(root.join("step-007")).unwrap();
    fs::create_dir(root.join("step-200")).unwrap();
    fs::write(root.join("step-300"), b"a file").unwrap();
    let file = step_path(root, 100).join("rank-00000-of-00001.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
    let steps: Vec<u64> = list(root).unwrap().into_iter().map(|(step, _)| step).collect();
    assert_eq!(steps, [9, 10, 100, 200]);
    assert_eq!(newest_whole(root).unwrap(), Some((10, step_path(root, 10))));
}

#[test]
fn later_ones_of_a_former_life_are_set_aside() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    for step in [1, 2, 3] {
        save_model(root, 1, step);
    }
    fs::create_dir(root.join("old-step-3")).unwrap();
    assert_eq!(set_aside_after(root, 1).unwrap(), [2, 3]);
    assert_eq!(names(root), ["old-step-2", "old-step-3", "old-step-3.1", "step-1"]);
    assert_eq!(newest_whole(root).unwrap().unwrap().0, 1);
}

#[test]
fn a_missing_rank_ends_the_wait_and_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options { timeout: Duration::from_millis(50), ..options("run") };
    let mut writer = Writer::new(folder.path(), 0, options).unwrap();
    let error = writer.save(share(&model(), 0, 3, 1), Some(meta(1))).unwrap_err().to_string();
    assert!(error.contains("step 1: no part from rank 1, 2 within"), "{error}");
    assert_eq!(newest_whole(folder.path()).unwrap(), None);
    // The next whole save takes what the failed one left with it.
    writer.save(state(2), Some(meta(2))).unwrap();
    assert_eq!(names(folder.path()), ["step-2"]);
}

#[test]
fn a_rank_that_cannot_write_tells_rank_0() {
    let folder = tempfile::tempdir().unwrap();
    let mut bad = share(&model(), 1, 2, 1);
    bad.pieces[0].data.pop();
    let mut one = Writer::new(folder.path(), 1, options("run")).unwrap();
    assert!(one.save(bad, None).unwrap_err().to_string().contains("takes 72 bytes, found 71"));
    let mut zero = Writer::new(folder.path(), 0, options("run")).unwrap();
    let error = zero.save(share(&model(), 0, 2, 1), Some(meta(1))).unwrap_err().to_string();
    assert!(error.contains("rank 1 could not write its part: checkpoint of `w` (master)"), "{error}");
}

#[test]
fn pieces_that_do_not_cover_the_model_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut states: Vec<RankState> = (0..2).map(|rank| share(&model(), rank, 2, 1)).collect();
    states[1].pieces.remove(0);
    let error = save(folder.path(), &options("a"), states, &meta(1)).unwrap_err().to_string();
    assert!(error.contains("do not cover the model: `w` (master): elements 17..35"), "{error}");
    let mut twice = share(&model(), 0, 1, 1);
    twice.pieces.push(twice.pieces[0].clone());
    let error = save(folder.path(), &options("b"), vec![twice], &meta(1)).unwrap_err().to_string();
    assert!(error.contains("`w` (master)") && error.contains("twice"), "{error}");
    assert_eq!(list(folder.path()).unwrap(), []);
}

#[test]
fn wrong_calls_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let mut writer = writer(folder.path(), 0);
    let message = |result: crate::Result<()>| result.unwrap_err().to_string();
    assert!(message(writer.save(share(&model(), 1, 2, 1), None)).contains("writer of rank 0 got the state of rank 1"));
    assert!(message(writer.save(state(1), None)).contains("rank 0 must give the meta data"));
    assert!(message(writer.save(state(1), Some(meta(2)))).contains("the meta data are of step 2"));
    let bad = Options { attempt: "../x".into(), ..Options::default() };
    assert!(matches!(Writer::new(folder.path(), 0, bad), Err(Error::Config(_))));
}

#[test]
fn background_saves_arrive_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let writers: Vec<AsyncWriter> = (0..3)
        .map(|rank| AsyncWriter::new(Writer::new(root, rank, Options { keep: 2, ..options("run") }).unwrap()).unwrap())
        .collect();
    std::thread::scope(|scope| {
        for (rank, writer) in writers.iter().enumerate() {
            scope.spawn(move || {
                for step in 1..=4 {
                    let meta = (rank == 0).then(|| meta(step));
                    writer.submit(share(&model(), rank, 3, step), meta).unwrap();
                }
                writer.flush().unwrap();
            });
        }
    });
    assert_eq!(names(root), ["step-3", "step-4"]);
    Checkpoint::open(&step_path(root, 4)).unwrap().verify().unwrap();
}

#[test]
fn background_errors_surface_once_and_the_thread_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("checkpoints");
    fs::write(&root, b"a file where the folder should be").unwrap();
    let writer = AsyncWriter::new(Writer::new(&root, 1, options("run")).unwrap()).unwrap();
    writer.submit(share(&model(), 1, 2, 1), None).unwrap();
    let error = writer.flush().unwrap_err();
    assert!(matches!(&error, Error::Io { .. }) && error.to_string().contains("checkpoints"), "{error}");
    writer.flush().unwrap();
    fs::remove_file(&root).unwrap();
    writer.submit(share(&model(), 1, 2, 2), None).unwrap();
    writer.flush().unwrap();
    assert_eq!(names(&root), [".step-2.run-1.partial"]);
}

#[test]
fn dropped_in_mid_save_it_finishes() {
    let folder = tempfile::tempdir().unwrap();
    let writer = AsyncWriter::new(writer(folder.path(), 0)).unwrap();
    writer.submit(state(1), Some(meta(1))).unwrap();
    drop(writer);
    assert_eq!(newest_whole(folder.path()).unwrap().unwrap().0, 1);
}
