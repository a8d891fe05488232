#include "pool.h"

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <unistd.h>

namespace hisparsed {
namespace {

struct Job {
    const std::function<void(int64_t)> *body;
    int64_t count;
    std::atomic<int64_t> next{0}, done{0};

    void work() {
        for (int64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) {
            (*body)(i);
            done.fetch_add(1, std::memory_order_release);
        }
    }
};

class Pool {
public:
    std::mutex running;

    void run(const std::shared_ptr<Job> &job, int64_t helpers) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            try {
                for (; started_ < helpers; ++started_)
                    std::thread([this] { serve(); }).detach();
            } catch (const std::system_error &) {
                // Fewer threads than wished: the caller does the rest.
            }
            job_ = job;
            seats_ = helpers;
        }
        wake_.notify_all();
        job->work();
        while (job->done.load(std::memory_order_acquire) < job->count) std::this_thread::yield();
        std::lock_guard<std::mutex> lock(mutex_);
        job_.reset();
    }

private:
    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [this] { return job_ && seats_ > 0; });
            --seats_;
            std::shared_ptr<Job> job = job_;
            lock.unlock();
            job->work();
            job.reset();
            lock.lock();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::shared_ptr<Job> job_;
    int64_t seats_ = 0, started_ = 0;
};

// Threads do not survive a fork, so a child makes its own pool. Pools are never destroyed:
// their threads may outlive the statics of an exiting process.
Pool &pool() {
    static std::mutex guard;
    static Pool *current = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(guard);
    if (current == nullptr || owner != getpid()) {
        current = new Pool;
        owner = getpid();
    }
    return *current;
}

}  // namespace

void parallel_for(int64_t count, int64_t threads, const std::function<void(int64_t)> &body) {
    if (count > 1 && threads > 1) {
        Pool &shared = pool();
        std::unique_lock<std::mutex> running(shared.running, std::try_to_lock);
        if (running.owns_lock()) {
            auto job = std::make_shared<Job>();
            job->body = &body;
            job->count = count;
            shared.run(job, (threads < count ? threads : count) - 1);
            return;
        }
    }
    for (int64_t i = 0; i < count; ++i) body(i);
}

}  // namespace hisparsed
