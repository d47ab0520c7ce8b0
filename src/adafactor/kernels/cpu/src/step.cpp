// Who does what when, and the functions that Python calls.
#include <atomic>
#include <new>
#include <thread>

#include "between.h"

namespace adafactor {

// torch's own threads. From torch 2.10 on its library has a loop in plain C; before, the one of its OpenMP is called.
using Range = void (*)(int64_t begin, int64_t end, void* context);
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Range, void* context);
using Parallel = void (*)(void (*)(void* context), void* context, unsigned threads, unsigned flags);

constexpr int64_t SMALL = 1 << 20;  // elements up to which a tensor is one thread's alone, if there are enough for all

enum Phase : int64_t { MOMENTS, NORMS, APPLY };  // the contract's verbs (core/contract.py)

// How far threads have come with the chunks of one pass.
struct alignas(64) Progress {
    std::atomic<int64_t> begun = 0, done = 0;
    std::atomic<bool> closed = false;
};

// The phases from `first` to `last` of all jobs, the largest first. Large ones are stepped by all threads together, one
// after the other; each small one by one thread, so that it stays in that core's cache. Threads take small ones while
// they wait.
//
// All passes are in one parallel region, and no thread waits for a *particular* other one: however many come, and
// however late, they do all the work. So a busy machine costs little: with a region for each pass, every one of them
// would end when the last thread has been given a core.
struct Step {
    Job* const jobs;
    const int64_t count, threads, first, last;
    int64_t large = 0;  // how many jobs, from the first on, are large
    int64_t scratch_of_large = 0, scratch_of_small = 0, scratch = 0;
    Progress* passes = nullptr;  // three of each large job
    std::atomic<int64_t> small_begun = 0, workers = 0;

    Step(Job* jobs, int64_t count, int64_t threads, int64_t first, int64_t last)
        : jobs(jobs), count(count), threads(threads), first(first), last(last) {
        int64_t total = 0;
        for (int64_t i = 0; i < count; ++i) total += jobs[i].present ? jobs[i].elements() : 0;
        const int64_t most = std::min(SMALL, std::max(CHUNK, total / (4 * threads)));
        while (threads > 1 && large < count && jobs[large].elements() > most) ++large;
        if (!is_whole()) return;  // else each job has its own scratch, which lasts until the next phase
        for (int64_t i = 0; i < count; ++i) {
            int64_t& size = i < large ? scratch_of_large : scratch_of_small;
            size = std::max(size, bytes_of_scratch(jobs[i]));
        }
    }

    bool is_whole() const { return first == MOMENTS && last == APPLY; }
    int64_t progress() const { return 3 * large * int64_t(sizeof(Progress)); }
    int64_t bytes() const { return progress() + scratch_of_large + threads * scratch_of_small; }

    void run(int64_t memory, ParallelFor parallel_for, Parallel parallel) {
        passes = at<Progress>(memory);
        for (int64_t i = 0; i < 3 * large; ++i) new (passes + i) Progress;
        scratch = memory + progress();
        for (int64_t i = 0; is_whole() && i < large; ++i) jobs[i].scratch = scratch;
        if (first > MOMENTS)
            for (int64_t i = 0; i < count; ++i) begin_later(jobs[i]);
        const Range work = [](int64_t, int64_t, void* context) { static_cast<Step*>(context)->work(); };
        if (threads > 1 && parallel_for)
            parallel_for(0, threads, 1, work, this);
        else if (threads > 1 && parallel)
            parallel([](void* context) { static_cast<Step*>(context)->work(); }, this, unsigned(threads), 0);
        else
            work(0, 1, this);
    }

    void work() {
        const int64_t own = scratch + scratch_of_large + workers.fetch_add(1) * scratch_of_small;
        for (int64_t i = 0; i < large; ++i)
            if (jobs[i].present) take(jobs[i], &passes[3 * i], own);
        while (take_small(own)) continue;
    }

    // Takes the next small job through its phases; says whether there was one.
    bool take_small(int64_t own) {
        const int64_t i = large + small_begun.fetch_add(1);
        if (i >= count) return false;
        if (is_whole()) jobs[i].scratch = own;
        if (jobs[i].present) take(jobs[i], nullptr, own);
        return true;
    }

    // ---- a job's phases: passes over its chunks, and what is done once when a pass is complete

    void take(Job& job, Progress* progress, int64_t own) {
        const Scratch s = scratch_of(job);
        const int64_t chunks = chunks_of(job);
        const auto share = [&](int64_t pass, const auto& task, const auto& close) {
            share_pass(progress ? &progress[pass] : nullptr, chunks, own, task, close);
        };
        if (first == MOMENTS) {
            const auto sum = [&](int64_t i) {
                first_pass(job, i, s);
                if (reads_x(job)) measure(job, i, s);
            };
            share(0, sum, [&] { close_first_pass(job, s); });
        }
        if (last == MOMENTS || !job.taken) return;
        if (first <= NORMS && job.takes_second_pass)
            share(1, [&](int64_t i) { second_pass(job, i, s); }, [&] { close_second_pass(job, s); });
        if (last < APPLY) return;
        // backwards: it begins with what is still in the cache
        share(2, [&](int64_t i) { last_pass(job, chunks - 1 - i, s); }, [&] { finish(job, s); });
    }

    void close_first_pass(Job& job, const Scratch& s) const {
        take_means(job, s);
        if (last == MOMENTS) return;
        job.taken = job.finite || job.ignores_nonfinite;
        job.skipped += !job.taken;
        if (job.taken) take_norms(job, s);
    }

    void close_second_pass(Job& job, const Scratch& s) const {
        job.u2 = sum_of(job, s, &ChunkSums::u2);
        if (last == APPLY) conclude(job, s);
    }

    void take_norms(Job& job, const Scratch& s) const {
        take_factors(job, s);
        take_x2(job, s);
        if (last == APPLY && !job.takes_second_pass) conclude(job, s);
    }

    // What comes before the passes, where a step stops between its phases: Python has said which steps are taken.
    void begin_later(Job& job) const {
        if (!job.present) return;
        job.skipped += last == APPLY && !job.taken;
        if (!job.taken) return;
        const Scratch s = scratch_of(job);
        first == NORMS ? take_norms(job, s) : conclude(job, s);
    }

    // Takes chunks until there is none left to begin. Whoever does the last one closes the pass.
    template <class Task, class Close>
    void share_pass(Progress* pass, int64_t chunks, int64_t own, const Task& task, const Close& close) {
        if (!pass) {
            for (int64_t i = 0; i < chunks; ++i) task(i);
            return close();
        }
        for (int64_t i; (i = pass->begun.fetch_add(1)) < chunks;) {
            task(i);
            if (pass->done.fetch_add(1) + 1 < chunks) continue;
            close();
            pass->closed.store(true);
        }
        while (!pass->closed.load())
            if (!take_small(own)) std::this_thread::yield();
    }
};

}  // namespace adafactor

using namespace adafactor;

#define FIELD_OF_INTEGER(name) #name ":i8,"
#define FIELD_OF_NUMBER(name) #name ":f8,"

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The fields of a job, in their order: "name:type,…".
EXPORT const char* adafactor_fields() { return JOB_FIELDS(FIELD_OF_INTEGER, FIELD_OF_NUMBER); }

// Reads the step counts of all jobs.
EXPORT void adafactor_counts(const Job* jobs, int64_t count, double* counts) {
    for (int64_t i = 0; i < count; ++i) counts[i] = *at<float>(jobs[i].t);
}

// The bytes of memory for some phases of all jobs, which should begin with a cache line.
EXPORT int64_t adafactor_memory(Job* jobs, int64_t count, int64_t threads, int64_t first, int64_t last) {
    return Step(jobs, count, threads, first, last).bytes();
}

// The bytes of a job's own scratch, which it needs where a step stops between its phases.
EXPORT int64_t adafactor_scratch(const Job* job) { return bytes_of_scratch(*job); }

// Gives a job its own scratch, and says where its sums are.
EXPORT void adafactor_place(Job* job, int64_t scratch) {
    job->scratch = scratch;
    const Scratch s = scratch_of(*job);
    job->row_sums = reinterpret_cast<int64_t>(s.row), job->col_sums = reinterpret_cast<int64_t>(s.col);
}

// Takes all jobs that are present through some phases; the largest come first.
EXPORT void adafactor_run(Job* jobs, int64_t count, int64_t memory, int64_t threads, int64_t first, int64_t last,
                          ParallelFor parallel_for, Parallel parallel) {
    Step(jobs, count, threads, first, last).run(memory, parallel_for, parallel);
}
