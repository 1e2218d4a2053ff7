// What was chosen for the latest problems, for launchers whose choice takes longer than a launch.
#pragma once

#include <algorithm>
#include <array>

namespace fa {

// The choices for the latest problems.  A new one replaces the oldest.  For one thread: make it `thread_local`.
template <typename Problem, typename Choice>
class Remembered {
 public:
  static constexpr int MOST = 64;

  // Returns the choice for a problem, or null if it is not remembered.
  const Choice* find(const Problem& problem) {
    if (count_ > 0 && problems_[latest_] == problem) return &choices_[latest_];
    for (int i = 0; i < count_; ++i) {
      if (problems_[i] == problem) return &choices_[latest_ = i];
    }
    return nullptr;
  }

  // Remembers the choice for a problem that is not remembered yet.
  void keep(const Problem& problem, const Choice& choice) {
    latest_ = next_;
    problems_[next_] = problem;
    choices_[next_] = choice;
    count_ = std::max(count_, next_ + 1);
    next_ = (next_ + 1) % MOST;
  }

 private:
  std::array<Problem, MOST> problems_ = {};
  std::array<Choice, MOST> choices_ = {};
  int count_ = 0, next_ = 0, latest_ = 0;
};

}  // namespace fa
